"""Whole numbers with discrete Gaussian noise, drawn exactly and in blocks.

P(x) ∝ exp(-x² / 2v). The whole number v is the variance (to within 10^-6). The method is
rejection from a discrete Laplace distribution (Canonne, Kamath & Steinke, "The Discrete Gaussian
for Differential Privacy", NeurIPS 2020), in one step:

- x = u + t · k with t a power of two near √v, u uniform in [0, t), and P(k) ∝ e^-k;
- accept x with probability exp(-γ), γ = x² / 2v - k + c, where c makes every γ ≥ 0;
- choose a sign; reject -0.

Exactness: each decision compares a uniform number U in [0, 1) with a probability p. The first bits
of U and a floating-point approximation of p decide if they differ by more than the approximation's
error. Otherwise U gets further random bits, and p further digits, until they differ. So no
decision is ever rounded. The only assumption is that numpy's exp has a relative error below 2^-40.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Random = Callable[[int], bytes]
"""Source of random bytes, such as `os.urandom`."""

LARGEST_VARIANCE: Final = 2**90
"""Upper limit of the variance; x stays below 2^52 and is exact as a double."""
_LAST_K: Final = 44
"""Largest k with e^-k ≥ 2^-64: up to it, 64 bits decide k, except on a tie."""
_MARGIN: Final = 2.0**-36
"""Upper bound on the error of an approximated probability."""
_BLOCK: Final = 2**15
"""Number of proposals drawn at once; their arrays stay in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian:
    """The distribution P(x) ∝ exp(-x² / 2v). variance: v, from 1 to `LARGEST_VARIANCE`."""

    variance: int

    def __post_init__(self) -> None:
        if not 1 <= self.variance <= LARGEST_VARIANCE:
            raise ValueError(f"not a valid variance: {self.variance}")

    def draw(self, count: int, random: Random) -> NDArray[np.int64]:
        """Return `count` independent numbers, int64."""
        out = np.empty(count, np.int64)
        filled = 0
        while filled < count:
            found = self._proposed(min(_BLOCK, 2 * (count - filled) + 64), random)
            some = found[: count - filled]
            out[filled : filled + some.size] = some
            filled += some.size
        return out

    @property
    def _bits(self) -> int:
        """Number of bits of u: t = 2^bits is the power of two with a ratio to √v nearest to 1."""
        return max(0, round(math.log2(self.variance) / 2))

    @property
    def _shift(self) -> Fraction:
        """The smallest c that makes γ ≥ 0 for all x: max of k - (t · k)² / 2v."""
        scale = Fraction(4**self._bits, 2 * self.variance)
        return max(k - scale * k * k for k in range(5))

    def _proposed(self, count: int, random: Random) -> NDArray[np.int64]:
        """Return the numbers accepted from `count` proposals, in the order of the proposals."""
        words = np.frombuffer(random(24 * count), "<u8").reshape(3, count)
        k = _geometric(words[1], random)
        bits = self._bits
        x = (words[0] & np.uint64((1 << bits) - 1)).astype(np.int64) + (k << bits)
        values = x.astype(np.float64)
        values *= values
        values /= 2.0 * self.variance
        values -= k
        values += float(self._shift)
        np.negative(values, out=values)
        np.exp(values, out=values)
        values -= (words[2] >> np.uint64(11)) * 2.0**-53
        accepted = values > 0
        unclear = np.abs(values) <= _MARGIN
        unclear |= k > _LAST_K
        for place in np.flatnonzero(unclear):
            accepted[place] = self._accepts(int(x[place]), int(k[place]), words[2, place], random)
        negative = words[0] >> np.uint64(63) == 1
        accepted &= ~(negative & (x == 0))
        np.negative(x, out=x, where=negative)
        found: NDArray[np.int64] = x[accepted]
        return found

    def _accepts(self, x: int, k: int, word: np.uint64, random: Random) -> bool:
        """Return True if a proposal is accepted; uses only as many digits as the decision needs."""
        gamma = Fraction(x * x, 2 * self.variance) - k + self._shift
        return _compared(int(word), 64, gamma, random)[0]


def _geometric(words: NDArray[np.uint64], random: Random) -> NDArray[np.int64]:
    """Return numbers k ≥ 0 with P(k) ∝ e^-k, one for each uniform word."""
    thresholds = _thresholds()
    k = _LAST_K - np.searchsorted(thresholds, words, side="right").astype(np.int64)
    # `k` counts the thresholds above the word. A word that equals a threshold, or is below all of
    # them, needs more bits.
    unclear = words <= thresholds[0]
    unclear |= thresholds[_LAST_K - k - 1] == words
    for place in np.flatnonzero(unclear):
        k[place] = _exact_geometric(int(words[place]), random)
    return k


def _exact_geometric(word: int, random: Random) -> int:
    """Count the k ≥ 1 for which a uniform number with these first bits is below e^-k."""
    bits, k = 64, 0
    while True:
        # U is the same uniform number for all k; further bits refine it.
        below, word, bits = _compared(word, bits, Fraction(k + 1), random)
        if not below:
            return k
        k += 1


@lru_cache(maxsize=1)
def _thresholds() -> NDArray[np.uint64]:
    """Return ⌊e^-k · 2^64⌋ for k = 44, …, 1, ascending."""
    context = Context(prec=60)
    powers = (context.exp(Decimal(-k)) for k in range(_LAST_K, 0, -1))
    return np.array([int(context.multiply(each, Decimal(2**64))) for each in powers], np.uint64)


def _compared(word: int, bits: int, gamma: Fraction, random: Random) -> tuple[bool, int, int]:
    """Return whether a uniform number U is below exp(-gamma), and the bits of U drawn so far.

    word: the first `bits` bits of U; further ones come from `random` if needed. gamma: ≥ 0.
    """
    if gamma == 0:
        return True, word, bits
    while True:
        low, high = _exp_bounds(gamma, bits)
        if word + 1 <= low:
            return True, word, bits
        if word >= high:
            return False, word, bits
        word = word << 64 | int.from_bytes(random(8), "little")
        bits += 64


def _exp_bounds(gamma: Fraction, bits: int) -> tuple[int, int]:
    """Return whole numbers around exp(-gamma) · 2^bits."""
    digits = bits // 3 + 40
    context = Context(prec=digits)
    exponent = context.divide(Decimal(gamma.numerator), Decimal(gamma.denominator))
    # Total error: exp rounds correctly, and the quotient adds an error of 10^-digits · gamma.
    power = context.exp(-exponent)
    scaled = context.multiply(power, Decimal(2**bits))
    error = int(context.multiply(scaled, Decimal(10) ** (4 - digits)) * (int(gamma) + 2)) + 1
    return max(0, int(scaled) - error), int(scaled) + 1 + error
