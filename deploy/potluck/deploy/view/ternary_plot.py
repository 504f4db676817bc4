"""A ternary plot of heterogeneity triplets: a point per client, at its components' shares."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(3) / 2]])
"""Corners of pure class imbalance, attribute imbalance and spurious correlation."""

_NAMES = ("class\nimbalance", "attribute\nimbalance", "spurious correlation")
_GRID = "#d0d0d0"
_INK = "#333333"


def ternary_points(triplets: Floats) -> Floats:
    """Return positions (K × 2) of triplets (K × 3, ≥ 0) by their shares; (0, 0, 0): the middle."""
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
