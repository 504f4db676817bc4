"""A Gaussian process of how clients' losses change together (FedCor).

Each client is a point in a space of few dimensions. The inner product of two clients' points is the
covariance of their loss changes in a round: Σ = X Xᵀ + noise² I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from potluck.server.selection import Floats, Rows
from potluck.server.selectors.parts.choosing import largest

NOISE = 0.01
_FIRST, _SECOND, _EPSILON = 0.9, 0.999, 1e-8
_LEAST_VARIANCE = 1e-12
_SEED = 0


def beginning(clients: int, dimension: int) -> Floats:
    """Return random points of about unit length, clients × dimension; the same points at each
    call."""
    generator = np.random.Generator(np.random.PCG64(_SEED))
    points: Floats = generator.standard_normal((clients, dimension)) / np.sqrt(dimension)
    return points


def weighted_mean(changes: Floats, weights: Floats) -> Floats:
    """Return the mean change of each client's loss; 0 if none is known.

    changes: rounds × clients, NaN if unknown. weights: one per round, > 0.
    """
    known = ~np.isnan(changes)
    total = (weights[:, None] * known).sum(axis=0)
    summed = (weights[:, None] * np.nan_to_num(changes)).sum(axis=0)
    mean: Floats = summed / np.maximum(total, 1e-300)
    return mean


def fitted(
    points: Floats, changes: Floats, weights: Floats, *, steps: int, learning_rate: float
) -> Floats:
    """Return the points after some steps of Adam on the weighted log marginal likelihood.

    points: clients × d. changes: rounds × clients, minus their mean; NaN if unknown. Each step is
    O(clients · d · (d + rounds)).
    """
    points = points.copy()
    first, second = np.zeros_like(points), np.zeros_like(points)
    patterns = list(_alike(changes, weights))
    for step in range(1, steps + 1):
        gradient = np.zeros_like(points)
        for rows, values, shares in patterns:
            gradient[rows] += _gradient(points[rows], values, shares)
        first = _FIRST * first + (1 - _FIRST) * gradient
        second = _SECOND * second + (1 - _SECOND) * gradient**2
        rate = learning_rate * np.sqrt(1 - _SECOND**step) / (1 - _FIRST**step)
        points -= rate * first / (np.sqrt(second) + _EPSILON)
    return points


def _alike(changes: Floats, weights: Floats) -> Iterator[tuple[Rows, Floats, Floats]]:
    """Yield groups of rounds in which the losses of the same clients are known: these clients,
    their changes, and the rounds' weights."""
    known = ~np.isnan(changes)
    for pattern in np.unique(known, axis=0):
        if pattern.any():
            rounds = (known == pattern).all(axis=1)
            yield np.flatnonzero(pattern), changes[rounds][:, pattern], weights[rounds]


def _gradient(points: Floats, changes: Floats, weights: Floats) -> Floats:
    """Return the gradient of Σ_t w_t (½ r_tᵀ Σ⁻¹ r_t + ½ log det Σ) with respect to the points, n ×
    d. changes: r_t of each round t. weights: w_t.

    Σ is n × n and never computed: Σ⁻¹ X = X A⁻¹, where A = Xᵀ X + noise² I is d × d.
    """
    inner = points.T @ points + NOISE**2 * np.eye(points.shape[1])
    root = cho_factor(inner, lower=True)
    spread = cho_solve(root, points.T).T  # Σ⁻¹ X
    seen = changes @ spread  # rounds × d
    solved = (changes - seen @ points.T) / NOISE**2  # Σ⁻¹ r
    gradient: Floats = weights.sum() * spread - (weights[:, None] * solved).T @ seen
    return gradient


def chosen(
    points: Floats,
    shares: Floats,
    discounts: Floats,
    count: int,
    generator: np.random.Generator,
) -> tuple[Sequence[int], NDArray[np.float64]]:
    """Return positions chosen one after another, and the expected gain of each.

    With the covariance C of loss changes, each next position k has the largest discount_k · Σ_i p_i
    C_ik / √C_kk; C is then conditioned on k. shares: p. O(count · n · (d + count)).
    """
    variance = (points**2).sum(axis=1) + NOISE**2
    total = points @ (points.T @ shares) + NOISE**2 * shares
    taken = np.zeros((len(points), count))
    picks, gains = list[int](), np.zeros(count)
    open_ = np.ones(len(points), dtype=bool)
    for place in range(count):
        deviation = np.sqrt(np.maximum(variance, _LEAST_VARIANCE))
        scores = np.where(open_, discounts * total / deviation, -np.inf)
        pick = largest(scores, generator)
        gains[place] = scores[pick]
        column = points @ points[pick] - taken[:, :place] @ taken[pick, :place]
        column[pick] += NOISE**2
        column /= deviation[pick]
        taken[:, place] = column
        total = total - column * (column @ shares)
        variance = variance - column**2
        open_[pick] = False
        picks.append(pick)
    return picks, gains
