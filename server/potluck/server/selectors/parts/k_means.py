"""k-means: Lloyd's algorithm from several k-means++ starts (Arthur 2007); returns the best
result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Floats

_RESTARTS = 10
_STEPS = 100
_MOST = 5_000
"""Maximum number of points from which centres are computed. If there are more, an evenly spaced
sample is used."""


def k_means(points: Floats, clusters: int, *, seed: int = 0) -> Floats:
    """Return at most `clusters` centres (rows of d numbers); fewer if there are fewer distinct
    points.

    points: n × d, n ≥ 1, finite. The same points and seed give the same centres.
    """
    scale = float(np.abs(points).max()) or 1.0
    spread = np.linspace(0, len(points) - 1, min(len(points), _MOST)).astype(np.int64)
    chosen = points[spread] / scale  # keeps squares finite
    generator = np.random.Generator(np.random.PCG64(seed))
    best, least = chosen[:1], np.inf
    for _ in range(_RESTARTS):
        centres = _lloyd(chosen, _beginning(chosen, clusters, generator))
        far = float(distances(chosen, centres).min(axis=1).sum())
        if far < least:
            best, least = centres, far
    return best * scale


def nearest(points: Floats, centres: Floats) -> NDArray[np.int64]:
    """Return, for each point, the position of its nearest centre. If several centres are equally
    near, the first one is returned."""
    scale = max(float(np.abs(points).max(initial=0)), float(np.abs(centres).max())) or 1.0
    found: NDArray[np.int64] = distances(points / scale, centres / scale).argmin(axis=1)
    return found


def distances(points: Floats, centres: Floats) -> Floats:
    """Return squared distances between points and centres, n × k, ≥ 0. The squares of all inputs
    must be finite."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    found: Floats = np.maximum(squares - 2 * points @ centres.T, 0.0)
    return found


def _beginning(points: Floats, clusters: int, generator: np.random.Generator) -> Floats:
    """Choose initial centres by k-means++: draw each point with probability ∝ its squared distance
    to the nearest centre chosen before."""
    centres: Floats = points[generator.integers(len(points))][None]
    while len(centres) < clusters:
        far = distances(points, centres).min(axis=1)
        total = far.sum()
        if not total > 0:
            break
        drawn = np.searchsorted(far.cumsum(), generator.random() * total, side="right")
        centres = np.concatenate([centres, points[min(int(drawn), len(points) - 1)][None]])
    return centres


def _lloyd(points: Floats, centres: Floats) -> Floats:
    before = None
    for _ in range(_STEPS):
        labels = distances(points, centres).argmin(axis=1)
        if before is not None and np.array_equal(labels, before):
            break
        before = labels
        members = np.zeros((len(centres), len(points)))
        members[labels, np.arange(len(points))] = 1.0
        sizes = members.sum(axis=1)
        means = members @ points / np.maximum(sizes, 1)[:, None]
        centres = np.where(sizes[:, None] > 0, means, centres)
    return centres
