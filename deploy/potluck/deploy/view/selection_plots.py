"""A plot of selection: cohorts by round, evenness of their labels, accuracies.

Planned and executed selections are drawn in the same way. If an executed selection lost clients,
the plot also shows the clients that were included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from potluck.common.learning.heterogeneity import triplets
from potluck.deploy.view.picture import Picture
from potluck.deploy.view.pictures import write_picture
from potluck.server.live.cohort_labels import cohort_labels
from potluck.server.selection import Population, Rows

# The ternary plot ---------------------------------------------------------------------------------

Floats = NDArray[np.float64]

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])
"""Corners (x, y) of pure class imbalance, attribute imbalance and spurious correlation."""

_NAMES = ("class\nimbalance", "attribute\nimbalance", "spurious correlation")
_GRID = "#d0d0d0"
_INK = "#333333"


def ternary_points(triplets: Floats) -> Floats:
    """Return positions (K × 2) in the triangle for triplets (K × 3, ≥ 0). Zeros give the middle."""
    sums = triplets.sum(axis=1, keepdims=True)
    shares = np.full(triplets.shape, 1 / 3)
    np.divide(triplets, sums, out=shares, where=sums > 0)
    points: Floats = shares @ CORNERS
    return points


def draw_triangle(axes: Axes) -> None:
    """Draw the triangle, lines at 20, 40, 60 and 80 % of each component, and the corners' names."""
    axes.set_aspect("equal")
    axes.axis("off")
    outline = np.vstack([CORNERS, CORNERS[:1]])
    axes.plot(outline[:, 0], outline[:, 1], color=_INK, linewidth=1, zorder=2)
    for share in (0.2, 0.4, 0.6, 0.8):
        for corner in range(3):
            first, second = (CORNERS[other] for other in range(3) if other != corner)
            ends = np.array(
                [share * CORNERS[corner] + (1 - share) * end for end in (first, second)]
            )
            axes.plot(ends[:, 0], ends[:, 1], color=_GRID, linewidth=0.6, zorder=1)
    for share in (20, 40, 60, 80):
        # along the left side, spurious correlation goes from 0 at the bottom to 100 % at the top
        x, y = CORNERS[0] + share / 100 * (CORNERS[2] - CORNERS[0])
        axes.text(x - 0.02, y, f"{share} %", ha="right", va="center", fontsize=7, color="#777777")
    for name, (x, y), up, shift in zip(
        _NAMES, CORNERS, ("top", "top", "bottom"), (-1, -1, 1), strict=True
    ):
        axes.text(x, y + 0.07 * shift, name, ha="center", va=up, fontsize=8, color=_INK)
    axes.set_xlim(-0.16, 1.16)
    axes.set_ylim(-0.22, 1.02)


# The plots ----------------------------------------------------------------------------------------

_INK = "#333333"
_GREY = "#777777"
_GROUPS = (
    ("class imbalance", "#0072B2"),
    ("attribute imbalance", "#D55E00"),
    ("spurious correlation", "#009E73"),
    ("no heterogeneity", "#CC79A7"),
    ("no triplet", "#555555"),
)
_LABEL_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D00",
)  # fmt: skip
HETEROGENEITIES = tuple(name for name, _ in _GROUPS)
"""Names of the groups whose numbers `dominant_heterogeneity` returns."""

_MOST_NAMED_CLIENTS = 40
_ROW_INCHES = 0.13
_MOST_MEASURES = 4
_PANEL_INCHES = 1.5


def dominant_heterogeneity(population: Population) -> NDArray[np.int64]:
    """Return, for each client, the index of its triplet's largest component: 0, 1 or 2.

    3: all components are 0. 4: the client has no triplet. If no client has disclosed a triplet,
    triplets are computed from the interaction matrices.
    """
    found = _triplets(population)
    if found is None:
        return np.full(len(population), 4)
    missing = np.isnan(found[:, 0])
    known = np.nan_to_num(found)
    groups: NDArray[np.int64] = known.argmax(axis=1)
    groups[known.max(axis=1) <= 0] = 3
    groups[missing] = 4
    return groups


def dominant_label(label_counts: Floats) -> NDArray[np.int64]:
    """Return each client's most frequent class: the lower of two with equal counts; C if unknown.

    label_counts: K × C, possibly noisy, NaN if a client disclosed none.
    """
    known = np.nan_to_num(label_counts).clip(min=0)
    labels: NDArray[np.int64] = known.argmax(axis=1)
    labels[known.max(axis=1) <= 0] = label_counts.shape[1]
    return labels


def client_groups(
    population: Population,
) -> tuple[NDArray[np.int64], Sequence[tuple[str, str]]]:
    """Return (the group of each client, each group's name and colour).

    Groups are by dominant heterogeneity; if only label counts are known, by dominant label.
    """
    counts = population.label_counts
    if counts is None or _triplets(population) is not None:
        return dominant_heterogeneity(population), _GROUPS
    named = [
        (f"mostly class {label}", _LABEL_COLOURS[label % len(_LABEL_COLOURS)])
        for label in range(counts.shape[1])
    ]
    return dominant_label(counts), [*named, ("no label counts", "#555555")]


def plot_selection(
    population: Population,
    cohorts: Mapping[int, Rows],
    path: Path,
    *,
    title: str,
    included: Mapping[int, Rows] | None = None,
    accuracies: Mapping[str, Mapping[int, float]] | None = None,
    measures: Mapping[str, Mapping[int, float]] | None = None,
) -> None:
    """Write the plot of a selection as a PNG; see `selection_picture`."""
    picture = selection_picture(
        population,
        cohorts,
        title=title,
        included=included,
        accuracies=accuracies,
        measures=measures,
    )
    write_picture(picture, path, dpi=140)


def selection_picture(
    population: Population,
    cohorts: Mapping[int, Rows],
    *,
    title: str,
    included: Mapping[int, Rows] | None = None,
    accuracies: Mapping[str, Mapping[int, float]] | None = None,
    measures: Mapping[str, Mapping[int, float]] | None = None,
) -> Picture:
    """Return a plot of at least one round. cohorts: rows of the population by round, in order.

    The other arguments are for a run. included: clients whose update became part of the model, by
    round. accuracies: shares in [0, 1] by name and round. measures: metrics of a task's own
    trainer, by title and round.
    """
    measured = dict(list((measures or {}).items())[:_MOST_MEASURES])
    groups, named = client_groups(population)
    found = _triplets(population)
    height = float(np.clip(_ROW_INCHES * len(population), 1.8, 6.5))
    heights = [height]
    heights += [] if population.label_counts is None else [_PANEL_INCHES] * 2
    heights += [_PANEL_INCHES] * (len(measured) + bool(accuracies))
    wide, narrow = 7.8, 0.0 if found is None else 4.2
    figure = Picture(width=wide + narrow, height=1.2 + max(sum(heights), 1.2 * narrow))
    if found is None:
        left: FigureBase = figure
    else:
        grid = figure.add_gridspec(1, 2, width_ratios=[wide, narrow])
        left, right = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        picks = _picks(len(population), cohorts)
        above, below = right.subplots(2, 1, height_ratios=[1.5, 1])
        _draw_ternary(above, found, groups, picks)
        _draw_shares(below, groups, picks)
    column = left.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    panels: list[Axes] = column[:, 0].tolist()
    _draw_raster(panels[0], population, cohorts, included or cohorts, groups, named, height)
    if population.label_counts is not None:
        _draw_labels(panels[1], panels[2], population.label_counts, cohorts, included)
    if accuracies:
        _draw_accuracies(panels[-1 - len(measured)], accuracies)
    last = panels[len(panels) - len(measured) :]
    for axes, (name, values) in zip(last, measured.items(), strict=True):
        axes.plot(list(values), list(values.values()), color="#0072B2", marker="o", markersize=3)
        axes.set_title(name, loc="left", fontsize=10, color=_INK)
        _dress(axes)
    panels[-1].set_xlabel("round", color=_INK)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panels[-1].set_xlim(min(cohorts) - 0.6, max(cohorts) + 0.6)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    return figure


def _triplets(population: Population) -> Floats | None:
    if population.triplets is not None:
        return population.triplets
    matrices = population.interaction_matrices
    return None if matrices is None else triplets(matrices)


def _picks(clients: int, cohorts: Mapping[int, Rows]) -> NDArray[np.int64]:
    picks = np.zeros(clients, dtype=np.int64)
    for rows in cohorts.values():
        picks[rows] += 1
    return picks


def _draw_raster(
    axes: Axes,
    population: Population,
    cohorts: Mapping[int, Rows],
    included: Mapping[int, Rows],
    groups: NDArray[np.int64],
    named: Sequence[tuple[str, str]],
    height: float,
) -> None:
    order = np.argsort(groups, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    width = max(72 * height / len(order) * 0.72, 0.9)
    for group in np.unique(groups).tolist():
        name, colour = named[group]
        members = np.flatnonzero(groups == group)
        low, high = place[members].min() - 0.5, place[members].max() + 0.5
        axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
        axes.annotate(
            f"{name}\n{_clients(len(members))}", (1.0, (low + high) / 2),
            xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8, color=colour,
        )  # fmt: skip
        lines = [
            np.array([(number - 0.42, place[row]), (number + 0.42, place[row])])
            for number, rows in cohorts.items()
            for row in rows[groups[rows] == group].tolist()
        ]
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, capstyle="butt"))
    lost = [
        (number, place[row])
        for number, rows in cohorts.items()
        for row in np.setdiff1d(rows, included[number]).tolist()
    ]
    if lost:
        numbers, places = zip(*lost, strict=True)
        axes.scatter(numbers, places, marker="x", s=20, color="white", linewidths=1.6, zorder=3)
    axes.set_ylim(len(order) - 0.5, -0.5)
    if len(order) <= _MOST_NAMED_CLIENTS:
        axes.set_yticks(range(len(order)), [str(population.ids[int(row)]) for row in order])
    else:
        axes.set_yticks([])
    axes.set_ylabel("client", color=_INK)
    crossed = ", × without becoming part of the model" if lost else ""
    axes.set_title(f"who was selected when{crossed}", loc="left", fontsize=10, color=_INK)
    _dress(axes)
    axes.tick_params(axis="y", length=0, labelsize=7)


def _draw_labels(
    entropies: Axes,
    distances: Axes,
    label_counts: Floats,
    cohorts: Mapping[int, Rows],
    included: Mapping[int, Rows] | None,
) -> None:
    numbers = list(cohorts)
    marker = "o" if len(numbers) <= 60 else ""
    most = np.log2(label_counts.shape[1])
    entropies.axhline(most, color=_GREY, linewidth=1, linestyle="--")
    entropies.annotate(
        f"all classes\nequal: {most:.2f}", (1.0, most), xycoords=("axes fraction", "data"),
        xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=_GREY,
    )  # fmt: skip
    shown = [("", cohorts, "-", 1.0)]
    if included is not None:
        shown = [("selected", cohorts, "-", 0.4), ("included", included, ":", 1.0)]
    for who, chosen, line, alpha in shown:
        measured = cohort_labels(label_counts, chosen)
        style: dict[str, Any] = {"linestyle": line, "alpha": alpha, "marker": marker}
        entropies.plot(numbers, measured.entropy, color="#0072B2", label=who, markersize=3, **style)
        for values, name, colour in (
            (measured.to_balanced, "to balanced classes", "#D55E00"),
            (measured.to_federation, "to the federation's mix", "#009E73"),
        ):
            label = f"{name}, {who}" if who else name
            distances.plot(numbers, values, color=colour, label=label, markersize=3, **style)
    entropies.set_ylabel("bits", color=_INK)
    entropies.set_title("entropy of the cohort's labels", loc="left", fontsize=10, color=_INK)
    distances.set_ylim(bottom=0)
    distances.set_ylabel("1 − cosine", color=_INK)
    distances.set_title("distance of the cohort's labels", loc="left", fontsize=10, color=_INK)
    _name_lines(distances)
    if included is not None:
        entropies.legend(
            loc="lower left", bbox_to_anchor=(1.0, 0.0), frameon=False, fontsize=8, handlelength=1.8
        )
    _dress(entropies)
    _dress(distances)


_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")


def _draw_accuracies(axes: Axes, accuracies: Mapping[str, Mapping[int, float]]) -> None:
    for (name, values), colour in zip(accuracies.items(), cycle(_LINES)):
        last = f"{name}: {list(values.values())[-1]:.1%}"
        marker = "o" if len(values) <= 60 else ""
        axes.plot(
            list(values), list(values.values()),
            color=colour, label=last, marker=marker, markersize=3,
        )  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("accuracy of the model", loc="left", fontsize=10, color=_INK)
    _name_lines(axes)
    _dress(axes)


def _name_lines(axes: Axes) -> None:
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, handlelength=1.8
    )


def _draw_ternary(
    axes: Axes, found: Floats, groups: NDArray[np.int64], picks: NDArray[np.int64]
) -> None:
    axes.set_title("triplets, larger with more picks", loc="left", fontsize=10, color=_INK)
    draw_triangle(axes)
    shown = np.flatnonzero(groups < 4)
    points = ternary_points(found[shown])
    colours = np.array([colour for _, colour in _GROUPS])[groups[shown]]
    sizes = 14 + 120 * picks[shown] / max(int(picks.max()), 1)
    axes.scatter(
        points[:, 0], points[:, 1], s=sizes, c=colours.tolist(), alpha=0.45,
        edgecolors=_INK, linewidths=0.5, zorder=3,
    )  # fmt: skip


def _draw_shares(axes: Axes, groups: NDArray[np.int64], picks: NDArray[np.int64]) -> None:
    present = np.unique(groups)
    clients = np.array([(groups == group).mean() for group in present])
    selected = np.array([picks[groups == group].sum() for group in present]) / picks.sum()
    heights = np.arange(len(present))
    colours = [_GROUPS[group][1] for group in present.tolist()]
    axes.barh(heights - 0.19, selected, height=0.34, color=colours)
    axes.barh(heights + 0.19, clients, height=0.34, color="white", edgecolor=colours, hatch="////")
    for height, (share, base) in enumerate(zip(selected, clients, strict=True)):
        axes.text(share + 0.01, height - 0.19, f"{share:.0%} of picks", va="center", fontsize=8)
        axes.text(base + 0.01, height + 0.19, f"{base:.0%} of clients", va="center", fontsize=8)
    axes.set_yticks(heights, [_GROUPS[group][0] for group in present.tolist()], fontsize=8)
    axes.set_ylim(len(present) - 0.4, -0.6)
    axes.set_xlim(0, 1.35 * max(float(selected.max()), float(clients.max())))
    axes.set_xticks([])
    axes.set_title("picks by what dominates", loc="left", fontsize=10, color=_INK)
    _dress(axes)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number:,} clients"


def _dress(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=8)
