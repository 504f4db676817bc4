"""k-means: Lloyd's steps from several k-means++ beginnings, the best of them (Arthur 2007)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Floats

_RESTARTS = 10
_STEPS = 100
_MOST = 5_000
"""Points that centres are found on; of more, every so-manieth."""


def k_means(points: Floats, clusters: int, *, seed: int = 0) -> Floats:
    """Return centres, at most `clusters` × d, fewer if there are fewer different points.

    points: n ≥ 1 × d, finite. The same points and seed give the same centres.
    """
    scale = float(np.abs(points).max()) or 1.0
    spread = np.linspace(0, len(points) - 1, min(len(points), _MOST)).astype(np.int64)
    chosen = points[spread] / scale  # so that no square overflows
    generator = np.random.Generator(np.random.PCG64(seed))
    best, least = chosen[:1], np.inf
    for _ in range(_RESTARTS):
        centres = _lloyd(chosen, _beginning(chosen, clusters, generator))
        far = float(distances(chosen, centres).min(axis=1).sum())
        if far < least:
            best, least = centres, far
    return best * scale


def nearest(points: Floats, centres: Floats) -> NDArray[np.int64]:
    """For each point the position of the nearest centre; the first of equals."""
    scale = max(float(np.abs(points).max(initial=0)), float(np.abs(centres).max())) or 1.0
    found: NDArray[np.int64] = distances(points / scale, centres / scale).argmin(axis=1)
    return found


def distances(points: Floats, centres: Floats) -> Floats:
    """n × k squared distances, ≥ 0; of numbers whose squares are finite."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    found: Floats = np.maximum(squares - 2 * points @ centres.T, 0.0)
    return found


def _beginning(points: Floats, clusters: int, generator: np.random.Generator) -> Floats:
    """k-means++: each next centre is a point, drawn by its squared distance to those before."""
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
