"""Probabilities with which clients are in a cohort, and cohorts drawn by such probabilities."""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Floats, Rows


def least_variance(lengths: Floats, count: int) -> Floats:
    """Return the probabilities p in [0, 1] that sum to `count` and minimise Σ lengths²/p.

    p ∝ length, except that p is limited to 1. lengths: ≥ 0, at least `count`; if fewer than `count`
    are above 0, these have p = 1, and the other clients share the rest of `count` equally.
    """
    clients = len(lengths)
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order]
    sums = np.cumsum(ascending)
    # if l clients have p < 1, the largest p of these is (count + l − clients) · length / sum
    below = np.arange(1, clients + 1)
    budget = count + below - clients
    fits = (budget > 0) & (budget * ascending <= sums)
    found = np.ones(clients)
    if not fits.any() or sums[-1] <= 0:
        found[:] = count / clients
        return found
    last = int(np.flatnonzero(fits)[-1])
    if sums[last] > 0:
        found[: last + 1] = budget[last] * ascending[: last + 1] / sums[last]
    else:
        found[: last + 1] = budget[last] / below[last]
    result = np.empty(clients)
    result[order] = np.clip(found, 0.0, 1.0)
    return result


def systematic(chances: Floats, count: int, generator: np.random.Generator) -> Rows:
    """Draw `count` different positions, each with its probability. chances: in [0, 1], with sum
    `count`."""
    borders = np.cumsum(chances)
    borders *= count / borders[-1]
    places = np.arange(count) + generator.random()
    drawn = np.minimum(np.searchsorted(borders, places, side="right"), len(chances) - 1)
    positions: Rows = np.unique(drawn)
    if len(positions) < count:  # rounding can give two places to the same client
        others = np.setdiff1d(np.arange(len(chances)), positions)
        more = others[np.argsort(-chances[others], kind="stable")][: count - len(positions)]
        positions = np.append(positions, more)
    return positions
