"""A plot of mean ranks: a dot per arm, and the arms not significantly worse than the best."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from potluck.experiments.reports.contests import BEST, RankedReading
from potluck.experiments.reports.plots import png
from potluck.experiments.reports.ranks import Ranks
from potluck.experiments.reports.titles import MEASURES

_INK, _BEST, _OTHER = "#333333", "#0072B2", "#999999"
_MOST = 6


def plot_ranks(ranked_by: Sequence[RankedReading]) -> bytes | None:
    """Return a PNG of mean ranks, one panel per reading; None if nothing is ranked.

    Shows the first six readings. Readings at the best rounds are excluded, since no run knows its
    best round in advance. Ranks are over settings, or over cells if there is only one setting. The
    bar is the critical difference, from the best arm on; arms within it are blue.
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
