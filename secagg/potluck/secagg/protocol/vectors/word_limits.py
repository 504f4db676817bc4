"""Numbers as words that can be summed modulo 2^32 or 2^64, such that no sum wraps.

Words are two's complement: a sum is read as signed, which is exact as long as the true sum lies
within ±(2^(w−1) − 1). Bounds on each input and the number of clients n in the roster ensure that:

- counts: each input is at most `clip` ≤ 2^40 and n ≤ 2^16, so sums stay below 2^56;
- fixed point: |x| ≤ clip and S · clip ≤ M − 1 with M = ⌊(2^(w−1) − 1) / n⌋, so that a value has
  magnitude M at most, even after rounding;
- head: integers bounded by n · weight_bound, and metrics in the fixed point of `metric_scale`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.secagg.protocol.primitives.masks import Words, word_dtype
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.wire.messages import MAXIMUM_CLIENTS, Header, SumVector, VectorEncoding

COUNT_LIMIT: Final = 2**40
"""Largest count of one client."""
WEIGHT_LIMIT: Final = 2**40
"""Largest weight bound."""
HEAD_EXTRA: Final = 4
"""Number of words in the head that are not metrics: weight, clipped, failed, and the constant 1."""
_EXACT: Final = 2**53
_ROUNDING: Final = Fraction(1, 2**50)
"""Upper bound on the relative rounding error of a few products of doubles."""


def largest_sum(modulus_bits: int) -> int:
    """Return 2^(w−1) − 1, the largest sum that can be decoded."""
    return (1 << (modulus_bits - 1)) - 1


def vector_scale(vector: SumVector, clients: int) -> float:
    """Return the scale of a fixed-point vector: the word that represents 1.

    It is the vector's own scale or, if that is 0, the largest scale at which no sum over `clients`
    clients can wrap.
    """
    if vector.scale:
        return vector.scale
    most = largest_sum(vector.modulus_bits) // clients - 1
    if vector.modulus_bits == 64:
        most //= 2  # room for the rounding of doubles, which have 53 bits
    return most / vector.clip


def metric_scale(header: Header, clients: int) -> int:
    """Return the scale of metric · weight in the head; a power of two, for exact products."""
    bound = max(1, header.weight_bound) * max(1.0, header.metric_bound) * clients
    return 1 << max(0, min(32, math.floor(math.log2(2.0**62 / bound))))


def check_vector(vector: SumVector, header: Header, clients: int) -> None:
    """Raise BrokenRuleError: malformed for an invalid vector, wrap if sums over `clients` clients
    could wrap."""
    where = f"vector {vector.name[:40]!r}"
    require(
        vector.modulus_bits in (32, 64), Rule.MALFORMED, f"{where} must have words of 32 or 64 bits"
    )
    require(vector.length >= 1, Rule.MALFORMED, f"{where} is empty")
    require(
        math.isfinite(vector.clip) and vector.clip > 0,
        Rule.MALFORMED,
        f"the clip of {where} must be positive and finite",
    )
    require(
        math.isfinite(vector.scale) and vector.scale >= 0,
        Rule.MALFORMED,
        f"the scale of {where} must be finite and at least 0",
    )
    require(
        clients <= MAXIMUM_CLIENTS,
        Rule.WRAP,
        f"{where} is for {clients} clients, more than the maximum of {MAXIMUM_CLIENTS}",
    )
    if vector.encoding is VectorEncoding.COUNTS:
        # With a smaller clip, a refusal would tell whether a client has a larger count.
        sound = vector.clip == COUNT_LIMIT and vector.modulus_bits == 64
    elif vector.encoding is VectorEncoding.HEAD:
        sound = vector.modulus_bits == 64 and _head_fits(vector, header, clients)
    else:
        sound = _fixed_point_fits(vector, clients) and 1 <= header.weight_bound <= WEIGHT_LIMIT
    require(sound, Rule.WRAP, f"sums in {where} could overflow with {clients} clients")


def _fixed_point_fits(vector: SumVector, clients: int) -> bool:
    scale = vector_scale(vector, clients)
    if not (math.isfinite(scale) and scale > 0):
        return False
    largest = Fraction(scale) * Fraction(vector.clip) * (1 + _ROUNDING) + Fraction(1, 2)
    return largest <= largest_sum(vector.modulus_bits) // clients


def _head_fits(vector: SumVector, header: Header, clients: int) -> bool:
    if not 1 <= header.weight_bound <= WEIGHT_LIMIT:
        return False
    if not math.isfinite(header.metric_bound) or header.metric_bound < 0:
        return False
    magnitude = header.weight_bound * header.metric_bound * metric_scale(header, clients) + 1
    return (
        vector.length == HEAD_EXTRA + len(header.metrics)
        and clients * magnitude <= largest_sum(64)
        and clients * header.weight_bound <= _EXACT
    )


def to_words(values: NDArray[Any], modulus_bits: int) -> Words:
    """Return integers of any type as words of a vector, modulo 2^w."""
    signed: NDArray[np.int64] = np.asarray(values, np.int64)
    return signed.astype(np.uint64).astype(word_dtype(modulus_bits))


def to_integers(words: Words) -> NDArray[np.int64]:
    """Return a copy of the signed numbers that words stand for. words: dtype `<u4` or `<u8`."""
    return as_signed(words).astype(np.int64)


def as_signed(words: Words) -> NDArray[np.signedinteger[Any]]:
    """Return the same memory as signed numbers. words: dtype `<u4` or `<u8`."""
    return words.view(np.dtype(f"<i{words.dtype.itemsize}"))
