"""Pictures of an experiment: its metric, the cohorts' label entropy, the selections, by round."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from potluck.experiments.grid.definition import Reading
from potluck.experiments.grid.results import CellResult, RoundResult
from potluck.experiments.reports.contests import BEST, RankedReading
from potluck.experiments.reports.experiment_summary import Arm, Summary
from potluck.experiments.reports.ranks import Ranks
from potluck.experiments.reports.readings import MEASURES, deviation, evaluations

# Pictures -----------------------------------------------------------------------------------------

_INK = "#333333"
# Okabe and Ito's palette; further lines have the same colours, dashed
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
_MOST_COLOURED = 14
"""Maximum number of coloured arms in a panel.

With more, only a few are coloured: the baseline, the best three and the worst two.
"""
_MOST_RASTERS = 12
_FEW_ROUNDS = 30
"""Maximum number of rounds that are also drawn as dots: a line of a single round is invisible."""


def panels(summary: Summary) -> list[tuple[str, list[Arm]]]:
    """Return the arms by panel: one panel per column, or one for all arms."""
    axis = summary.experiment.reading.columns
    if axis is None:
        return [("", list(summary.arms))]
    columns = dict.fromkeys(arm.labels[axis] for arm in summary.arms)
    return [
        (f"{axis} = {column}", [arm for arm in summary.arms if arm.labels[axis] == column])
        for column in columns
    ]


def plot_metric(summary: Summary) -> bytes:
    """Return `metric_figure` as a PNG."""
    return png(metric_figure(summary))


def metric_figure(summary: Summary) -> Figure:
    """Plot the metric by round: means over seeds, bands of one standard deviation."""
    metric = summary.experiment.reading.metric
    return _lines(
        summary,
        metric.replace("_", " "),
        lambda cell: evaluations(cell.rounds, metric),
        targets=summary.experiment.reading.targets,
        hold=True,
    )


def plot_entropy(summary: Summary) -> bytes:
    """Return a PNG of the cohorts' label entropy by round: means over seeds, bands."""

    def entropies(cell: CellResult) -> list[tuple[int, float]]:
        return [(each.round, each.entropy) for each in cell.rounds]

    return png(_lines(summary, "entropy of the cohort's labels, bits", entropies))


def plot_rasters(summary: Summary) -> bytes:
    """Return `raster_figure` as a PNG."""
    return png(raster_figure(summary))


def raster_figure(summary: Summary) -> Figure:
    """Plot the clients included in each round, for the first seed of each arm."""
    arms = summary.arms[:_MOST_RASTERS]
    columns = min(3, len(arms))
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, arm in zip(grid, arms, strict=False):
        _raster(axes, arm.cells[0])
        axes.set_title(_name(arm), fontsize=9, loc="left", color=_INK)
    for axes in grid[len(arms) :]:
        axes.set_visible(False)
    return figure


def included_matrix(rounds: Sequence[RoundResult], clients: int) -> np.ndarray:
    """Return clients × rounds, int8: 1 if the client's update became part of the model."""
    matrix = np.zeros((clients, len(rounds)), dtype=np.int8)
    for column, each in enumerate(rounds):
        rows = [int(client.rpartition("-")[2]) for client in each.included]
        matrix[rows, column] = 1
    return matrix


def _raster(axes: Axes, cell: CellResult) -> None:
    matrix = included_matrix(cell.rounds, cell.clients)
    axes.imshow(
        matrix, aspect="auto", interpolation="nearest", cmap=ListedColormap(["#f4f4f2", "#e0912f"]),
        extent=(0.5, len(cell.rounds) + 0.5, cell.clients - 0.5, -0.5), vmin=0, vmax=1,
    )  # fmt: skip
    axes.set_xlabel("round", fontsize=8, color=_INK)
    axes.set_ylabel("client", fontsize=8, color=_INK)
    axes.tick_params(labelsize=7, length=0)
    _whole_numbers(axes.xaxis)
    _whole_numbers(axes.yaxis)


def _whole_numbers(axis: Axis) -> None:
    """Put ticks only at whole numbers, since rounds and clients are whole."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _lines(
    summary: Summary,
    title: str,
    read: Callable[[CellResult], list[tuple[int, float]]],
    *,
    targets: Sequence[float] = (),
    hold: bool = False,
) -> Figure:
    """Draw a value by round, in one panel per column of arms.

    hold: True to repeat the last value of a cell that stopped early, up to the other cells' last
    round.
    """
    shown = panels(summary)
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes, (name, arms) in zip(grid, shown, strict=False):
        coloured = in_colour(arms, summary.experiment.reading)
        for arm in arms:
            number = coloured.index(arm) if arm in coloured else None
            _band(axes, arm, number, read, hold=hold)
        for target in targets:
            axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(name, fontsize=10, loc="left", color=_INK)
        axes.set_xlabel("round", color=_INK)
        axes.set_ylabel(title, color=_INK)
        _whole_numbers(axes.xaxis)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return figure


def in_colour(arms: Sequence[Arm], reading: Reading) -> list[Arm]:
    """Return the arms with a colour and a legend entry: all, or a few if there are too many."""
    if len(arms) <= _MOST_COLOURED:
        return list(arms)
    sign = 1.0 if reading.metric == "loss" else -1.0
    ordered = sorted(
        (arm for arm in arms if not math.isnan(arm.mean)), key=lambda arm: sign * arm.mean
    )
    base = [
        arm
        for arm in arms
        if reading.baseline and all(arm.labels[a] == each for a, each in reading.baseline.items())
    ]
    chosen = [*base, *(arm for arm in ordered if arm not in base)]
    return chosen if len(chosen) <= _MOST_COLOURED else [*chosen[: len(base) + 3], *chosen[-2:]]


def held(cells: Sequence[list[tuple[int, float]]]) -> list[list[tuple[int, float]]]:
    """Return (round, value) of each cell; repeat the last value in later rounds of other cells."""
    rounds = sorted({number for values in cells for number, _ in values})
    return [
        [*values, *((number, values[-1][1]) for number in rounds if number > values[-1][0])]
        if values
        else []
        for values in cells
    ]


def _band(
    axes: Axes,
    arm: Arm,
    number: int | None,
    read: Callable[[CellResult], list[tuple[int, float]]],
    *,
    hold: bool,
) -> None:
    """Draw an arm's line and band.

    number: index of its colour; None: a thin grey line without band.
    """
    by_round: dict[int, list[float]] = {}
    of_cells = [read(cell) for cell in arm.cells]
    for values in held(of_cells) if hold else of_cells:
        for round_number, value in values:
            by_round.setdefault(round_number, []).append(value)
    numbers = sorted(by_round)
    means = np.array([np.mean(by_round[each]) for each in numbers])
    if number is None:
        axes.plot(numbers, means, color="#cccccc", linewidth=0.8, zorder=1)
        return
    deviations = np.array([deviation(by_round[each]) or 0.0 for each in numbers])
    colour = _COLOURS[number % len(_COLOURS)]
    line = "-" if number < len(_COLOURS) else "--"
    dots = "o" if len(numbers) <= _FEW_ROUNDS else ""
    axes.plot(
        numbers, means, color=colour, linestyle=line, linewidth=1.6, marker=dots, markersize=3,
        label=_name(arm),
    )  # fmt: skip
    if len(arm.cells) > 1:
        axes.fill_between(
            numbers, means - deviations, means + deviations, color=colour, alpha=0.15, linewidth=0
        )


def _name(arm: Arm) -> str:
    return " · ".join(arm.labels.values()) or "the run"


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, facecolor="white", metadata={"Software": "Potluck"})
    return buffer.getvalue()


# Mean ranks ---------------------------------------------------------------------------------------

_BEST, _OTHER = "#0072B2", "#999999"
_MOST = 6


def plot_ranks(ranked_by: Sequence[RankedReading]) -> bytes | None:
    """Return a PNG of mean ranks, one panel per reading; None if nothing is ranked.

    Shows the first six readings. Readings at the best rounds are excluded, since no run knows its
    best round in advance. Ranks are over settings, or over cells if there is only one setting. A
    bar shows the critical difference, starting at the best arm; arms within it are blue.
    """
    shown = [
        (each, first_ranks(each))
        for each in ranked_by
        if len(each.by_cell.means) > 1 and each.reading != BEST
    ][:_MOST]
    if not shown:
        return None
    arms = max(len(ranks.means) for _, ranks in shown)
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns, (0.24 * arms + 1.1) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (each, ranks) in zip(grid, shown, strict=False):
        _panel(axes, ranks)
        axes.set_title(
            f"{MEASURES[each.measure]}, {each.reading}", fontsize=9, loc="left", color=_INK
        )
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    return png(figure)


def first_ranks(ranked: RankedReading) -> Ranks:
    """Return the ranks that a report shows first: over settings, if there are several."""
    return ranked.by_contest if ranked.by_contest.blocks > 1 else ranked.by_cell


def _panel(axes: Axes, ranks: Ranks) -> None:
    names, best = list(ranks.means), set(ranks.best)
    means = [ranks.means[name] for name in names]
    if ranks.difference is not None:
        axes.axvspan(means[0], means[0] + ranks.difference, color=_BEST, alpha=0.1, linewidth=0)
    for place, (name, mean) in enumerate(zip(names, means, strict=True)):
        axes.plot([mean], [place], "o", color=_BEST if name in best else _OTHER, markersize=5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("mean rank, 1 is best", fontsize=8, color=_INK)
    axes.tick_params(labelsize=8, length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
