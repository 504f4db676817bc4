"""Sorting networks: fixed lists of comparisons, which don't depend on the values.

They are the fastest way to sort a few values for each of millions of coordinates: numpy's minimum
and maximum do each comparison for a whole block of coordinates at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Comparison(NamedTuple):
    """Puts the smaller of values `low` and `high` into `low` and the larger into `high`.

    `keeps_low` or `keeps_high` is False if that value is not used again.
    """

    low: int
    high: int
    keeps_low: bool
    keeps_high: bool


@lru_cache(maxsize=32)
def selection_network(values: int, begin: int, end: int) -> tuple[Comparison, ...]:
    """Return comparisons that put the values of ranks [begin, end) into positions [begin, end)."""
    wanted = set(range(begin, end))
    kept: list[Comparison] = []
    for low, high in reversed(_merge_exchange(values)):
        if low in wanted or high in wanted:
            kept.append(Comparison(low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(kept))


def _merge_exchange(values: int) -> list[tuple[int, int]]:
    """Return Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Alg. M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(values - 1, 0).bit_length() >> 1
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(values - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
