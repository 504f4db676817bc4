"""Heat maps of an experiment: each arm's result in each setting, and the clients it selects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from potluck.experiments.reports.contests import (
    EQUAL,
    LAST,
    Contest,
    RankedReading,
    measures_of,
)
from potluck.experiments.reports.differences import baseline_of, differences, with_all
from potluck.experiments.reports.experiment_summary import Summary
from potluck.experiments.reports.plots import first_ranks, png
from potluck.experiments.reports.readings import BUDGETS, MEASURES, mean

_INK = "#333333"
_FAR = 0.3
"""Minimum difference between two shares for which the colour is the strongest."""
_COLUMN, _ROW, _NAMES, _HEAD = 0.46, 0.2, 1.4, 1.5
"""Width of a column, height of a row, width of the arms' names, height of the heads; in inches."""
_LEAST = 3.0
"""Minimum width of a panel in columns, so that its title fits."""
_DARK = 0.9
"""Minimum absolute value of a colour for which the text on it is white."""

Values = Mapping[tuple[str, str], float]
"""Numbers by arm and column."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A picture of a grid of numbers, one per arm and column.

    colours: in [-1, 1]; blue is above 0. texts: text of each cell. told: cells with bold text:
    they differ significantly from the baseline.
    """

    title: str
    columns: Sequence[str]
    colours: Values
    texts: Mapping[tuple[str, str], str]
    told: frozenset[tuple[str, str]] = frozenset()


def heat_maps(
    summary: Summary, contests: Sequence[Contest], ranked_by: Sequence[RankedReading]
) -> dict[str, bytes]:
    """Return PNGs by name: one per metric, with a panel for each reading, and one of the picks.

    Rows are arms, the best mean rank first. Empty if no arms are compared.
    """
    arms = _in_order(contests, ranked_by)
    if not arms:
        return {}
    found: dict[str, bytes] = {}
    for measure in measures_of(summary.experiment.reading):
        shown = [
            panel
            for name in (LAST, *(EQUAL + budget for budget in BUDGETS if budget != "rounds"))
            if (panel := measure_panel(summary, contests, measure, name)).texts
        ]
        if shown:
            found[measure] = _drawn(arms, shown)
    found["picks"] = _drawn(arms, [evenness_panel(contests), *leaning_panels(contests)])
    return found


def measure_panel(
    summary: Summary, contests: Sequence[Contest], measure: str, reading: str
) -> Panel:
    """Return the panel of a metric, in percent (a loss without conversion).

    The colour is the difference to the baseline: blue is better, and it is strongest from 0.3 on.
    Values that differ significantly from the baseline are bold. The last column is for all contests
    combined.
    """
    contests = with_all(contests)
    sign = -1.0 if measure == "loss" else 1.0
    base = baseline_of(summary.experiment.reading)
    colours: dict[tuple[str, str], float] = {}
    texts: dict[tuple[str, str], str] = {}
    told: set[tuple[str, str]] = set()
    for contest in contests:
        column = contest.column
        tested = differences(contest, base, measure, reading)
        for arm in contest.arms:
            value = mean(list(arm.readings.get((measure, reading), {}).values()))
            if math.isnan(value):
                continue
            texts[arm.name, column] = f"{value:.2f}" if measure == "loss" else f"{value:.0%}"[:-1]
            if arm.name in tested and not math.isnan(tested[arm.name].test.difference):
                colours[arm.name, column] = sign * tested[arm.name].test.difference / _FAR
                if tested[arm.name].told_apart:
                    told.add((arm.name, column))
    return Panel(
        title=f"{MEASURES[measure]}, {reading}",
        columns=[each.column for each in contests],
        colours=colours,
        texts=texts,
        told=frozenset(told),
    )


def evenness_panel(contests: Sequence[Contest]) -> Panel:
    """Return the panel of the evenness of each arm's picks; colour is strongest at 0, none at 1."""
    even = {
        (arm.name, contest.column): mean([each.evenness for each in arm.picks])
        for contest in contests
        for arm in contest.arms
    }
    return Panel(
        title="evenness of picks",
        columns=[each.column for each in contests],
        colours={key: value - 1 for key, value in even.items()},
        texts={key: f"{value:.2f}" for key, value in even.items() if not math.isnan(value)},
    )


def leaning_panels(contests: Sequence[Contest]) -> list[Panel]:
    """Return a panel per trait of clients: its correlation with picks, mean over seeds.

    A panel shows the contests in which the trait is known. Red: the arm avoids clients with a high
    value.
    """
    traits = dict.fromkeys(
        trait for contest in contests for arm in contest.arms for trait in arm.leanings
    )
    panels: list[Panel] = []
    for trait in traits:
        having = [each for each in contests if any(trait in arm.leanings for arm in each.arms)]
        values = {
            (arm.name, contest.column): mean([of.correlation for of in arm.leanings[trait]])
            for contest in having
            for arm in contest.arms
            if trait in arm.leanings
        }
        panels.append(
            Panel(
                title=trait,
                columns=[each.column for each in having],
                colours=values,
                texts={key: f"{value:+.1f}" for key, value in values.items()},
            )
        )
    return panels


def _in_order(contests: Sequence[Contest], ranked_by: Sequence[RankedReading]) -> list[str]:
    """Return all arms: ranked arms by mean rank, then arms without a rank."""
    ranked = first_ranks(ranked_by[0]).means if ranked_by else {}
    return list(dict.fromkeys([*ranked, *(arm.name for each in contests for arm in each.arms)]))


def _drawn(arms: Sequence[str], panels: Sequence[Panel]) -> bytes:
    widths = [max(_LEAST, len(panel.columns)) for panel in panels]
    figure = Figure(
        figsize=(_NAMES + _COLUMN * sum(widths) + 0.1 * len(panels), _HEAD + _ROW * len(arms)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths).ravel()
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        _draw(axes, arms, panel)
        axes.set_yticks(range(len(arms)), arms if number == 0 else [""] * len(arms), fontsize=8)
    return png(figure)


def _draw(axes: Axes, arms: Sequence[str], panel: Panel) -> None:
    table = np.array(
        [[panel.colours.get((arm, column), 0.0) for column in panel.columns] for arm in arms]
    )
    axes.imshow(table, aspect="auto", interpolation="nearest", cmap="RdBu", vmin=-1.6, vmax=1.6)
    for row, arm in enumerate(arms):
        for place, column in enumerate(panel.columns):
            key = arm, column
            axes.text(
                place, row, panel.texts.get(key, "–"), ha="center", va="center", fontsize=7,
                color="white" if abs(panel.colours.get(key, 0.0)) > _DARK else "black",
                fontweight="bold" if key in panel.told else "normal",
            )  # fmt: skip
    axes.set_xticks(range(len(panel.columns)), panel.columns, fontsize=7, rotation=60, ha="right")
    axes.set_title(panel.title, fontsize=8, loc="left", color=_INK)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
