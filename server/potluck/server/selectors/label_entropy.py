"""The entropy of a label distribution after adding each of many clients' counts to it.

Of L + l, with M samples in all, it is ln M − (1/M) Σ x ln x over x = L_j + l_j. Every client is
scored in double precision: in blocks that stay in the cache, on several threads, a million clients
with ten classes take some 20 ms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.common.heterogeneity import entropy
from potluck.server.selectors.parallel import Run

Floats = NDArray[np.float64]

_TINY = 1e-300
"""Added to every count: no logarithm of zero, and no sum changes."""


def bits(counts: Floats) -> Floats:
    """Entropy in bits over the last axis; 0 for a row of zeros."""
    result: Floats = entropy(counts) / np.log(2)
    return result


class Entropies:
    """Scores K clients by their counts (K × classes, ≥ 0) for one sum after another."""

    def __init__(self, counts: Floats) -> None:
        self._columns = np.ascontiguousarray(counts.T)
        self._totals = self._columns.sum(axis=0)
        self._scores = np.empty(len(counts))

    def with_each(self, base: Floats, run: Run) -> Floats:
        """Entropy in bits of base (classes) + counts, per client; overwritten by the next call."""
        shifted = base[:, None] + _TINY
        base_total = float(base.sum())

        def block(start: int, stop: int) -> None:
            values = self._columns[:, start:stop] + shifted
            terms = np.log(values)
            terms *= values
            totals = self._totals[start:stop] + base_total
            empty = totals <= 0
            totals[empty] = 1.0
            scores = (np.log(totals) - terms.sum(axis=0) / totals) / np.log(2)
            scores[empty] = 0.0
            self._scores[start:stop] = scores

        run(block)
        return self._scores
