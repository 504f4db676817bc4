"""Distributed noise: each client adds a share, and the sum has discrete Laplace noise.

A share is the difference of two negative binomial numbers NB(1/m, p) with p = e^(−ε/Δ). The sum of
m independent shares is the difference of two geometric numbers: P(x) ∝ e^(−|x| ε/Δ), exactly. m =
quorum − colluders: every set that is unmasked has at least m honest clients, and further clients
only add noise. (Goryczka and Xiong, "A comprehensive comparison of multiparty secure additions with
differential privacy", IEEE TDSC 2017, §4.)

If fewer than m clients of the set are honest, the guarantee weakens gradually: ε = 1 becomes 1.10
with 0.9 m honest clients and 1.68 with 0.5 m.

Sampling inverts a table of the distribution function in 128-bit whole numbers. A table ends where
less than 2^-64 of the probability is left, so that ε-differential privacy becomes (ε, δ) with δ ≤ Q
· 2^-60 for Q counts. Doubles are not used, since their low bits would disclose true values.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Final

from potluck.secagg.protocol.primitives.sharing import Random
from potluck.secagg.protocol.rules import BrokenRuleError, Rule
from potluck.secagg.protocol.wire.messages import Noise

LEAST_RATE: Final = 1e-4
"""Minimum of ε/Δ: below it, the table would grow beyond a million entries."""

_WORD_BYTES: Final = 16
_WORD: Final = 2 ** (8 * _WORD_BYTES)
_PRECISION_BITS: Final = 224
_TAIL: Final = 2 ** (_PRECISION_BITS - 64)
_CONTEXT: Final = Context(prec=90)


@dataclass(frozen=True)
class ShareTable:
    """The distribution function of NB(1/m, p): cumulative[k] = ⌊P(X ≤ k) · 2^128⌋; the last is
    2^128."""

    cumulative: tuple[int, ...]

    def sample(self, entropy: bytes) -> int:
        """Return the number drawn with 16 random bytes."""
        return bisect_right(self.cumulative, int.from_bytes(entropy, "big"))


@lru_cache(maxsize=16)
def share_table(epsilon: float, sensitivity: int, contributors: int) -> ShareTable:
    """Return the table of one share. epsilon: its printed decimal number is used.

    Raises BrokenRuleError (policy) for ε/Δ below 1e-4.
    """
    rate = _CONTEXT.divide(Decimal(repr(epsilon)), Decimal(sensitivity))
    if rate < Decimal(repr(LEAST_RATE)):
        raise BrokenRuleError(
            Rule.POLICY, f"the noise has ε/Δ = {rate:g}, below the minimum of {LEAST_RATE:g}"
        )
    p = _CONTEXT.exp(-rate)
    # P(0) = (1 − p)^(1/m); P(k + 1) = P(k) · (k + 1/m) / (k + 1) · p.
    start = _CONTEXT.power(1 - p, _CONTEXT.divide(Decimal(1), Decimal(contributors)))
    one = 2**_PRECISION_BITS
    step, mass = int(_CONTEXT.multiply(p, one)), int(_CONTEXT.multiply(start, one))
    masses, k = [mass], 0
    # When to stop: later entries sum to at most this entry times p / (1 − p).
    limit = int(_CONTEXT.divide(_CONTEXT.multiply(1 - p, _TAIL), p)) if p else 0
    while mass > limit:
        mass = mass * (k * contributors + 1) * step // ((k + 1) * contributors) >> _PRECISION_BITS
        masses.append(mass)
        k += 1
    shift = _PRECISION_BITS - 8 * _WORD_BYTES
    cumulative = [total >> shift for total in accumulate(masses)]
    return ShareTable((*cumulative[:-1], _WORD))


def noise_share(noise: Noise, counts: int, random: Random) -> list[int]:
    """Return one client's share of the noise: a whole number for each count."""
    table = share_table(noise.epsilon, noise.sensitivity, noise.contributors)
    entropy = random(2 * counts * _WORD_BYTES)
    drawn = [
        table.sample(entropy[begin : begin + _WORD_BYTES])
        for begin in range(0, len(entropy), _WORD_BYTES)
    ]
    return [plus - minus for plus, minus in zip(drawn[::2], drawn[1::2], strict=True)]
