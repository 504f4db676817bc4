"""The entropy of a label distribution after adding each of many clients' counts to it.

With L the sum up to now, l a client's counts and M samples in all, the entropy of L + l is ln M −
(1/M) Σ x ln x over x = L_j + l_j. Scores are in double precision, computed in blocks that fit the
cache, in several threads. A million clients with ten classes take about 20 ms.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from potluck.common.learning.heterogeneity import entropy
from potluck.server.selection import Floats
from potluck.server.selectors.parts.parallel import Pass

_TINY = 1e-300
"""Number added to every count, to avoid the logarithm of zero; it is too small to change a sum."""

_BITS = 1 / math.log(2)


def bits(counts: Floats) -> Floats:
    """Return the entropy in bits over the last axis; 0 for a row of zeros."""
    result: Floats = entropy(counts) * _BITS
    return result


class Entropies:
    """Scores K clients by their label counts (K × classes, ≥ 0), while the sum of the chosen
    clients changes."""

    def __init__(self, counts: Floats) -> None:
        self._columns = np.ascontiguousarray(counts.T)
        self._totals = self._columns.sum(axis=0)
        self._scores = np.empty(len(counts))
        self._scratch = threading.local()

    def with_each(self, base: Floats, run: Pass) -> Floats:
        """Return, for each client, the entropy in bits of `base` (one number per class) plus the
        client's counts.

        The next call overwrites the returned array.
        """
        shifted = base[:, None] + _TINY
        base_total = float(base.sum())

        def block(start: int, stop: int) -> None:
            values, terms = self._space(stop - start)
            np.add(self._columns[:, start:stop], shifted, out=values)
            np.log(values, out=terms)
            terms *= values
            scores = self._scores[start:stop]
            np.add.reduce(terms, axis=0, out=scores)
            totals = self._totals[start:stop] + base_total
            if base_total > 0:
                _to_bits(scores, totals)
            else:
                empty = totals <= 0
                totals[empty] = 1.0
                _to_bits(scores, totals)
                scores[empty] = 0.0

        run(block)
        return self._scores

    def _space(self, length: int) -> tuple[Floats, Floats]:
        """Return two scratch arrays (classes × length) that belong to the calling thread. They are
        reused, because allocating them would take as long as the arithmetic."""
        if getattr(self._scratch, "length", None) != length:
            self._scratch.length = length
            self._scratch.arrays = np.empty((2, len(self._columns), length))
        values, terms = self._scratch.arrays
        return values, terms


def _to_bits(scores: Floats, totals: Floats) -> None:
    """Convert Σ x ln x to entropy in bits, in place. totals: Σ x > 0."""
    scores /= totals
    np.subtract(np.log(totals), scores, out=scores)
    scores *= _BITS
