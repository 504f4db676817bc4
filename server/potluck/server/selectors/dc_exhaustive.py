"""A selector that tries all subsets, for comparison with the greedy choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from math import comb
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Floats, Rows, Selection, SelectionContext, Selector, Signal
from potluck.server.selectors.parts.choosing import TIE
from potluck.server.selectors.parts.dc_parts import (
    balanced,
    begin,
    candidates,
    distance,
    federation_total,
)
from potluck.server.state import State

MOST_SUBSETS = 10**8
_LARGEST_TABLE = 5 * 10**5
_TARGETS = {"balanced": balanced, "real": federation_total}


@dataclass(kw_only=True)
class DcExhaustive(Selector):
    """Draws some clients; adds the subset of the others that best fits target labels.

    added: number of clients in the set. target: `balanced` or `real`, as in `dc-balanced` and
    `dc-real`. Tries every subset; refuses more than 10^8 subsets.
    """

    added: NonNegativeInt = 5
    target: Literal["balanced", "real"] = "balanced"

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def __post_init__(self) -> None:
        self.wants_label_totals = self.target == "real"  # as in dc-real

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Select `count` clients; raise ConfigurationError if there are too many subsets."""
        cohort, generator = begin(context, self.added)
        rows, counts, base = candidates(context, cohort)
        size = min(cohort.missing, len(rows))
        subsets = comb(len(rows), size)
        if subsets > MOST_SUBSETS:
            raise ConfigurationError(
                f"dc-exhaustive: {size} of {len(rows)} clients can be added in {subsets} ways, "
                f"more than 10^8; lower 'added' or use dc-balanced",
                subsets=subsets,
            )
        if size:
            target = _TARGETS[self.target](context.population)
            best = nearest_subset(counts, base, target, size, generator)
            total = distance(base + counts[best].sum(axis=0), target)
            reason = f"best of {subsets} subsets, distance to target {total:.4f}"
            cohort.extend(rows[best].tolist(), [reason] * size)
        cohort.draw(cohort.missing, "no label counts; drawn uniformly")
        return cohort.selection()


def nearest_subset(
    counts: Floats, base: Floats, target: Floats, size: int, generator: np.random.Generator
) -> Rows:
    """Return the positions of the `size` clients whose label counts, added to `base`, are nearest
    to `target`.

    counts: n × classes. base: label counts of the clients chosen before. Ties are broken uniformly.
    1 ≤ size ≤ n. Takes seconds for 10^8 subsets.
    """
    search = _Search(counts, base, target, size)
    best = np.array([search.distances(head).min() for head in search.heads()])
    limit = best.min() + TIE
    ties = [
        int(np.count_nonzero(search.distances(head) <= limit)) if least <= limit else 0
        for head, least in zip(search.heads(), best, strict=True)
    ]
    drawn = int(generator.integers(sum(ties)))
    for head, tied in zip(search.heads(), ties, strict=True):
        if drawn < tied:
            return search.subset(head, np.flatnonzero(search.distances(head) <= limit)[drawn])
        drawn -= tied
    raise AssertionError("unreachable: one of the ties was drawn")


class _Search:
    """Enumerates the subsets of a given size. Each subset is a head plus a tail from a table.

    Tails are in lexicographic order. So the tails that may follow a head are consecutive rows at
    the end of the table, and one matrix product scores them all.
    """

    def __init__(self, counts: Floats, base: Floats, target: Floats, size: int) -> None:
        clients = len(counts)
        self._tail = max(
            t for t in range(1, size + 1) if t == 1 or comb(clients, t) < _LARGEST_TABLE
        )
        self._head = size - self._tail
        self._counts, self._base, self._target = counts, base, target
        flat = chain.from_iterable(combinations(range(clients), self._tail))
        self._tails: Rows = np.fromiter(flat, dtype=np.int64).reshape(-1, self._tail)
        self._sums = sum(
            (counts[column] for column in self._tails.T), start=np.zeros((1, counts.shape[1]))
        )
        self._along = self._sums @ target
        self._squares = np.einsum("ij,ij->i", self._sums, self._sums)

    def heads(self) -> Iterator[tuple[int, ...]]:
        """Yield every head: the first positions of a subset, which a tail can complete."""
        return combinations(range(len(self._counts) - self._tail), self._head)

    def distances(self, head: tuple[int, ...]) -> Floats:
        """Return the distances of the sums of a head with each tail that may follow it."""
        start = self._start(head)
        base = self._base + self._counts[list(head)].sum(axis=0)
        squares = self._sums[start:] @ (2 * base)
        squares += self._squares[start:] + base @ base
        norms = np.sqrt(squares, out=squares) * np.linalg.norm(self._target)
        norms[norms <= 0] = np.inf
        result: Floats = 1 - (self._along[start:] + base @ self._target) / norms
        return result

    def subset(self, head: tuple[int, ...], tail: int) -> Rows:
        """Return the positions of a subset: a head, and the tail with index `tail` among those that
        may follow the head."""
        return np.array([*head, *self._tails[self._start(head) + tail]], dtype=np.int64)

    def _start(self, head: tuple[int, ...]) -> int:
        if not head:
            return 0
        after = len(self._counts) - head[-1] - 1
        return len(self._tails) - comb(after, self._tail)
