"""Functions that all selectors share: they break ties, complete a cohort and give reasons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import Floats, Population, Rows, Selection, SelectionContext

TIE = 1e-12
"""Scores that differ by at most this much count as equal; the round's generator decides between
them."""

TIE_DECIMALS = 12
"""Number of decimals to which scores are rounded if many are ranked at once; the same tolerance as
`TIE`."""


_Array = TypeVar("_Array", bound=NDArray[Any])


def grown(values: _Array, clients: int, fill: float = 0) -> _Array:
    """Return a copy of the values, at least K long, with `fill` for each client that has joined
    since the last round. clients: K."""
    joined = max(0, clients - len(values))
    return cast(_Array, np.append(values, np.full(joined, fill, dtype=values.dtype)))


def largest(scores: Floats, generator: np.random.Generator) -> int:
    """Return the position of the largest score; ties are broken uniformly. scores: not empty, no
    NaN."""
    best = int(scores.argmax())
    near = scores >= scores[best] - TIE
    if np.count_nonzero(near) == 1:
        return best
    tied = np.flatnonzero(near)
    return int(tied[generator.integers(len(tied))])


def weighted(weights: Floats, generator: np.random.Generator) -> int | None:
    """Draw a position with probability ∝ weight (≥ 0); None if all weights are zero."""
    cumulative = weights.cumsum()
    total = cumulative[-1] if len(cumulative) else 0.0
    if total <= 0:
        return None
    # side="right" skips positions of weight zero. Rounding may make the product equal to the total,
    # so the position is limited to the last one with a weight.
    position = int(np.searchsorted(cumulative, generator.random() * total, side="right"))
    return min(position, int(np.searchsorted(cumulative, total, side="left")))


def draw_weighted(weights: Floats, size: int, generator: np.random.Generator) -> Rows:
    """Draw `size` positions without replacement, each with probability ∝ weight (≥ 0).

    Positions of weight zero are drawn only if no others are left, uniformly. Uses exponential keys
    (Efraimidis and Spirakis 2006), so it takes O(K) for any `size`.
    """
    # The first key is infinite for a weight of zero; the second key orders these positions.
    first, second = generator.exponential(size=(2, len(weights)))
    keys = np.full(len(weights), np.inf)
    with np.errstate(over="ignore"):
        np.divide(first, weights, out=keys, where=weights > 0)
    near = np.arange(len(weights))
    if 0 < size < len(weights):
        near = np.flatnonzero(keys <= np.partition(keys, size - 1)[size - 1])
    order: Rows = near[np.lexsort((second[near], keys[near]))][:size]
    return order


def samples_or_mean(population: Population, rows: Rows) -> Floats:
    """Return numbers of samples. Unknown numbers are replaced by the mean of the known ones, or by
    1 if none is known."""
    samples = population.samples[rows].astype(np.float64)
    known = samples > 0
    return np.where(known, samples, samples[known].mean() if known.any() else 1.0)


def all_samples(population: Population) -> Floats:
    """Return each client's number of samples (K). Unknown numbers are replaced by the mean of all
    known ones, so that a client has the same number wherever it is used."""
    return samples_or_mean(population, np.arange(len(population)))


def relative_samples(samples: NDArray[np.int64], clients: int) -> Floats:
    """Return each client's number of samples, divided by the mean of the known numbers; 1 if
    unknown.

    samples: numbers in roster order, 0 if unknown. They may lack some of the `clients`, or include
    further ones that joined after a state was made.
    """
    numbers = np.zeros(max(clients, len(samples)))
    numbers[: len(samples)] = samples
    known = numbers > 0
    return np.where(known, numbers / numbers[known].mean() if known.any() else 1.0, 1.0)


def disclosed(table: NDArray[np.float64] | None, rows: Rows) -> Rows:
    """Return those of `rows` whose clients disclosed this column (K × …) of the population."""
    if table is None:
        return rows[:0]
    present = ~np.isnan(table.reshape(len(table), -1)[:, 0])
    return rows if present.all() else rows[present[rows]]


def with_labels(table: NDArray[np.float64] | None, rows: Rows) -> Rows:
    """Return those of `rows` whose clients disclosed label counts (K × C) that are not all 0.

    Negative counts, which noise may cause, are taken as 0.
    """
    if table is None:
        return rows[:0]
    present = np.asarray((table > 0).any(axis=1))
    return rows if present.all() else rows[present[rows]]


def profiles(table: Floats, rows: Rows) -> Floats:
    """Return some rows (sorted, without repeats) of a table. If these are all rows, return the
    table itself, without a copy."""
    return table if len(rows) == len(table) else table[rows]


class Cohort:
    """A cohort that a selector fills: up to `size` clients, in the order chosen, each with its
    reason."""

    def __init__(self, context: SelectionContext, generator: np.random.Generator) -> None:
        self.size = min(context.count, len(context.available))
        self.rows: list[int] = []
        self._reasons: list[str] = []
        self._available = context.available
        self._generator = generator

    @property
    def missing(self) -> int:
        """Number of clients still to be chosen."""
        return self.size - len(self.rows)

    def add(self, row: int, reason: str) -> None:
        """Choose one more client."""
        self.rows.append(row)
        self._reasons.append(reason)

    def draw(self, count: int, reason: str, among: Rows | None = None) -> Rows:
        """Choose up to `count` more clients uniformly. among: rows to choose from; None for all
        available clients."""
        candidates = self._available if among is None else among
        if self.rows:
            candidates = candidates[~np.isin(candidates, self.rows)]
        size = min(count, self.missing, len(candidates))
        drawn: Rows = self._generator.choice(candidates, size=size, replace=False)
        self.extend(drawn.tolist(), [reason] * size)
        return drawn

    def extend(self, rows: Iterable[int], reasons: Iterable[str]) -> None:
        """Choose several more clients."""
        self.rows.extend(rows)
        self._reasons.extend(reasons)

    def selection(self, weights: Floats | None = None) -> Selection:
        """Return the finished cohort. weights: see `Selection`."""
        rows = np.array(self.rows, dtype=np.int64)
        return Selection(rows=rows, reasons=tuple(self._reasons), weights=weights)
