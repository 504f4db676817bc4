"""Plots of a run, and of runs side by side: metrics by round, and the clients that trained."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator, PercentFormatter

from potluck.common.learning.measures import MeasuredModel
from potluck.common.learning.spread import QUANTILES, Coverage
from potluck.common.trainer import SHARE
from potluck.deploy.view.picture import Picture
from potluck.deploy.view.pictures import write_picture
from potluck.deploy.view.readable import (
    natural_order,
    readable_bytes,
    readable_count,
    readable_coverage,
    readable_measure,
    readable_seconds,
)
from potluck.deploy.view.run_comparison import LAST_ROUNDS, RunComparison
from potluck.deploy.view.run_summary import MeasureSummary, RoundSummary, RunSummary

_COLOURS = {
    True: ("#1b7f5c", "#c2417c", "#8a6d3b", "#2b6cb0", "#6a4fa3"),
    False: ("#3566a8", "#b5651d", "#6a4fa3", "#1b7f5c", "#c2417c"),
}
"""Colours of a plot's lines: under True for metrics that are shares, under False for all others."""
_ARMS = ("#8a8a86", "#1b7f5c", "#c2417c", "#3566a8", "#b5651d")
"""Colours of runs that are plotted side by side."""
_MOST_PANELS = 3
_INK = "#333333"
_GREY = "#666666"
_FAINT = "#dddddd"
_MOST_NAMED_CLIENTS = 40


def plot_run(summary: RunSummary, path: Path) -> None:
    """Write the plot of a run with at least one round as a PNG."""
    write_picture(run_figure(summary), path, dpi=150)


def run_figure(summary: RunSummary) -> Picture:
    """Return the plot of a run with at least one round."""
    clients = clients_of(summary)
    named = len(clients) <= _MOST_NAMED_CLIENTS
    raster_height = min(max(0.16 * len(clients), 1.4), 6.0)
    panels = _panels(_measured(summary))
    heights = [2.6, *[1.4] * (len(panels) - 1)]
    figure = Picture(width=9.0, height=0.6 + sum(heights) + raster_height)
    figure.get_layout_engine().set(h_pad=0.09)  # type: ignore[union-attr,call-arg]  # set above
    *measured, raster = figure.subplots(len(panels) + 1, 1, height_ratios=[*heights, raster_height])
    for axes, panel in zip(measured, panels, strict=True):
        _plot_measures(axes, panel, summary.history)
    _plot_raster(raster, summary.history, clients, named=named)
    for axes in (*measured, raster):
        _dress(axes, summary.rounds)
    for axes in measured:
        axes.tick_params(labelbottom=False)
        axes.spines["bottom"].set_visible(False)
    raster.set_xlabel("round", color=_INK)
    figure.suptitle(
        f"{summary.task} · {summary.selector} · {summary.strategy}",
        x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.text(0.988, 0.985, f"run {summary.run}", ha="right", va="top", fontsize=9, color=_GREY)
    figure.supxlabel(
        f"{readable_count(summary.rounds, 'round')} with {summary.count} of "
        f"{readable_count(summary.clients, 'client')} each in "
        f"{readable_seconds(summary.seconds)}; {readable_bytes(summary.bytes_down)} down, "
        f"{readable_bytes(summary.bytes_up)} up",
        x=0.012, ha="left", fontsize=9, color=_GREY,
    )  # fmt: skip
    return figure


def plot_comparison(comparison: RunComparison, path: Path) -> None:
    """Write the plot of runs side by side as a PNG."""
    write_picture(comparison_figure(comparison), path, dpi=150)


def comparison_figure(comparison: RunComparison) -> Picture:
    """Return the plot of runs side by side: one metric as lines, then each run's cohorts."""
    runs, measure = comparison.runs, comparison.measure
    clients = sorted({each for run in runs for each in clients_of(run)}, key=natural_order)
    raster_height = min(max(0.11 * len(clients), 1.4), 5.0)
    heights = [2.8, *[raster_height] * len(runs)]
    figure = Picture(width=9.0, height=0.8 + sum(heights))
    figure.get_layout_engine().set(h_pad=0.09)  # type: ignore[union-attr,call-arg]  # set above
    lines, *rasters = figure.subplots(len(heights), 1, height_ratios=heights)
    for arm, run, colour in zip(comparison.arms, runs, cycle(_ARMS), strict=False):
        found = [(entry.round, entry.value(measure.name)) for entry in run.history]
        points = [(number, value) for number, value in found if value is not None]
        last = readable_measure(arm.last, measure.unit)
        label = f"{arm.selector}: {last} in the last {LAST_ROUNDS} rounds"
        _plot_line(lines, points, colour, label, hollow=())
        if arm.reached is not None:
            lines.axvline(arm.reached, ymax=comparison.target, color=colour, linestyle=":")
    lines.axhline(comparison.target, color=_GREY, linewidth=0.8, linestyle="--")
    lines.set_ylim(-0.025, 1.025)
    lines.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lines.set_ylabel(f"{measure.label} {'↑' if measure.higher_is_better else '↓'}")
    _label_lines(lines)
    for axes, run in zip(rasters, runs, strict=True):
        _plot_raster(axes, run.history, clients, named=len(clients) <= _MOST_NAMED_CLIENTS)
        axes.set_ylabel(f"selected by {run.selector}")
    for axes in (lines, *rasters):
        _dress(axes, max(run.rounds for run in runs))
    for axes in (lines, *rasters[:-1]):
        axes.tick_params(labelbottom=False)
        axes.spines["bottom"].set_visible(False)
    rasters[-1].set_xlabel("round", color=_INK)
    first = runs[0]
    figure.suptitle(
        f"{first.task} · {' and '.join(run.selector for run in runs)}",
        x=0.012, ha="left", fontsize=13, fontweight="bold", color=_INK,
    )  # fmt: skip
    figure.supxlabel(
        f"same data, same seed, {first.count} of {readable_count(first.clients, 'client')} a "
        f"round; dashed line: the target of {readable_measure(comparison.target, measure.unit)}, "
        "dotted line: the first round that reached the target",
        x=0.012, ha="left", fontsize=9, color=_GREY,
    )  # fmt: skip
    return figure


def clients_of(summary: RunSummary) -> list[str]:
    """Return all clients that were ever selected; numbers in ids are sorted by value."""
    chosen = {client for entry in summary.history for client in entry.cohort}
    return sorted(chosen, key=natural_order)


def selection_matrix(history: Sequence[RoundSummary], clients: Sequence[str]) -> np.ndarray:
    """Return clients × rounds, int8: 1 if the client was in the round's cohort."""
    rows = {client: row for row, client in enumerate(clients)}
    matrix = np.zeros((len(clients), len(history)), dtype=np.int8)
    for column, entry in enumerate(history):
        for client in entry.cohort:
            matrix[rows[client], column] = 1
    return matrix


def _measured(summary: RunSummary) -> list[MeasureSummary]:
    """Return the metrics that at least one round has; all of the run's metrics if none has any."""
    found = [
        each
        for each in summary.measures
        if any(entry.value(each.name) is not None for entry in summary.history)
    ]
    return found or summary.measures


def _panels(measures: Sequence[MeasureSummary]) -> list[list[MeasureSummary]]:
    """Group metrics into one panel per unit: shares in [0, 1] first, then in declared order."""
    units = sorted(dict.fromkeys(each.unit for each in measures), key=lambda unit: unit != SHARE)
    return [[each for each in measures if each.unit == unit] for unit in units[:_MOST_PANELS]]


def _plot_measures(
    axes: Axes, measures: Sequence[MeasureSummary], history: Sequence[RoundSummary]
) -> None:
    """Draw the metrics of one unit as lines; the label states which direction is better."""
    for measure, colour in zip(measures, cycle(_COLOURS[measures[0].unit == SHARE]), strict=False):
        found = [(entry.round, entry.value(measure.name)) for entry in history]
        points = [(number, value) for number, value in found if value is not None]
        last = f" {readable_measure(points[-1][1], measure.unit)}" if points else ""
        partial = _partial(history, measure.name)
        if points and points[-1][0] in partial:
            last += f" ({readable_coverage(partial[points[-1][0]])})"
        _plot_line(axes, points, colour, f"{measure.label}{last}", hollow=partial)
        _plot_spread(axes, measure, colour, history)
    _label_lines(axes)
    first = measures[0]
    better = "↑" if first.higher_is_better else "↓"
    if first.unit == SHARE:
        axes.set_ylim(-0.025, 1.025)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylabel(f"{first.label} {better}")
        return
    values = [entry.value(each.name) for entry in history for each in measures]
    if all(value is None or value >= 0 for value in values):
        axes.set_ylim(bottom=0.0)
    unit = f" in {first.unit}" if first.unit else ""
    axes.set_ylabel(f"{first.label}{unit} {better}")


def _plot_spread(
    axes: Axes, measure: MeasureSummary, colour: str, history: Sequence[RoundSummary]
) -> None:
    """Draw the mean of the clients' worst tenth as a dashed line.

    If clients measured the run's own model, a band shows their middle four fifths.
    """
    found = [(entry.round, entry.spreads.get(measure.name)) for entry in history]
    known = [(number, each) for number, each in found if each is not None]
    if not known:
        return
    rounds = [number for number, _ in known]
    worst = [each.worst_tenth for _, each in known]
    low, high = (
        [each.quantiles[f"{share:g}"] for _, each in known]
        for share in (QUANTILES[0], QUANTILES[-1])
    )
    if not measure.name.startswith((MeasuredModel.TUNED, MeasuredModel.PERSONAL)):
        axes.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(
        rounds, worst, color=colour, linewidth=1.2, linestyle="--",
        label=f"{measure.label}, worst tenth {readable_measure(worst[-1], measure.unit)}",
    )  # fmt: skip


def _partial(history: Sequence[RoundSummary], measure: str) -> dict[int, Coverage]:
    """Return a metric's coverage in the rounds in which it is partial."""
    found = {entry.round: entry.coverage.get(measure) for entry in history}
    return {number: each.coverage for number, each in found.items() if each and each.partial}


def _plot_line(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    colour: str,
    label: str,
    *,
    hollow: Container[int],
) -> None:
    """Draw a line; its points are hollow in rounds in which the metric is partial."""
    if points:
        rounds, values = zip(*points, strict=True)
        axes.plot(
            rounds, values, color=colour, linewidth=1.8, label=label, marker="o", markersize=3
        )
        partial = [point for point in points if point[0] in hollow]
        if partial:
            axes.plot(
                *zip(*partial, strict=True), color=colour, linestyle="", marker="o", markersize=5,
                markerfacecolor="white", label="_partial",
            )  # fmt: skip


def _label_lines(axes: Axes) -> None:
    """Put the legend above the axes, so that no line crosses it."""
    if axes.lines:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 0.97), ncols=2, frameon=False, fontsize=9,
            labelcolor="linecolor", borderaxespad=0.0, handlelength=1.2,
        )  # fmt: skip


def _plot_raster(
    axes: Axes, history: Sequence[RoundSummary], clients: Sequence[str], *, named: bool
) -> None:
    matrix = selection_matrix(history, clients)
    rounds = np.array([entry.round for entry in history])
    edges = np.append(rounds - 0.5, rounds[-1] + 0.5)
    rows = np.arange(len(clients) + 1) - 0.5
    axes.pcolormesh(
        edges, rows, matrix, cmap=ListedColormap(["#f4f4f2", "#e0912f"]), vmin=0, vmax=1,
        edgecolors="white", linewidth=0.6 if matrix.size <= 20_000 else 0.0,
    )  # fmt: skip
    axes.set_ylim(len(clients) - 0.5, -0.5)
    axes.set_ylabel("clients selected")
    if named:
        picks = matrix.sum(axis=1)
        names = [f"{name}  {count:3d}×" for name, count in zip(clients, picks, strict=True)]
        axes.set_yticks(range(len(clients)), names, fontsize=7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _dress(axes: Axes, rounds: int) -> None:
    axes.set_xlim(0.5, rounds + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_INK)
    axes.yaxis.label.set_color(_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
