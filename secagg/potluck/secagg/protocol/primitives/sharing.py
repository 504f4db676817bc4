"""Shamir's secret sharing over the integers modulo p = 2^256 + 297.

p is the least prime above 2^256. So every 32-byte secret is a number of the field. A share is the
polynomial's value at x, a number below p: 33 bytes, big-endian. x is the holder's number, and is
not part of the share. (Shamir, "How to share a secret", CACM 22(11), 1979.)

Python's integers are not constant-time: timing may disclose secrets to other users of the machine.
It does not disclose them to the network: the work is done once for each session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33
_COEFFICIENT_BYTES: Final = 49
"""Random bytes per coefficient; modulo p, they differ from a uniform number by less than 2^-135."""

Random = Callable[[int], bytes]
"""Function that returns the given number of unpredictable bytes, as `os.urandom` does."""


def share(secret: bytes, threshold: int, holders: Sequence[int], random: Random) -> list[int]:
    """Return shares of a 32-byte secret for holders numbered ≥ 1, in their order.

    Any `threshold` ≥ 1 of them give the secret; fewer disclose nothing. Raises ValueError for a
    secret of another length, repeated holders or fewer holders than the threshold.
    """
    _check(secret, threshold, holders)
    entropy = random((threshold - 1) * _COEFFICIENT_BYTES)
    coefficients = [
        int.from_bytes(entropy[begin : begin + _COEFFICIENT_BYTES], "big") % PRIME
        for begin in range(0, len(entropy), _COEFFICIENT_BYTES)
    ]
    return evaluate(secret, coefficients, holders)


def evaluate(secret: bytes, coefficients: Sequence[int], holders: Iterable[int]) -> list[int]:
    """Return the polynomial secret + c₁·x + c₂·x² + … at each holder's number, modulo p."""
    descending = (*reversed(coefficients), int.from_bytes(secret, "big"))
    values = []
    for holder in holders:
        value = 0
        for coefficient in descending:  # x is small, so one reduction at the end is faster
            value = value * holder + coefficient
        values.append(value % PRIME)
    return values


def combine(shares: Mapping[int, int]) -> bytes | None:
    """Return the secret that these shares give; None if it has more than 32 bytes.

    shares: by holder's number.

    All given shares are used, so pass exactly `threshold` shares. Wrong shares give a wrong secret;
    check the result against a commitment.
    """
    holders = tuple(sorted(shares))
    weights = lagrange_weights(holders, 0)
    value = sum(weights[index] * shares[x] for index, x in enumerate(holders)) % PRIME
    return value.to_bytes(SECRET_BYTES, "big") if value.bit_length() <= 256 else None


@lru_cache(maxsize=512)
def lagrange_weights(holders: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Return the values of the holders' Lagrange basis polynomials at a point, modulo p."""
    weights = []
    for x in holders:
        numerator = denominator = 1
        for other in holders:
            if other != x:
                numerator = numerator * (at - other) % PRIME
                denominator = denominator * (x - other) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)


def to_bytes(value: int) -> bytes:
    """Return a share as the bytes that are sent."""
    return value.to_bytes(SHARE_BYTES, "big")


def from_bytes(data: bytes) -> int:
    """Return a share from the bytes received. Raises ValueError for another length, or a number not
    below p."""
    value = int.from_bytes(data, "big")
    if len(data) != SHARE_BYTES or value >= PRIME:
        raise ValueError("a share must be a number below 2^256 + 297 in 33 bytes")
    return value


def _check(secret: bytes, threshold: int, holders: Sequence[int]) -> None:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret must have {SECRET_BYTES} bytes, not {len(secret)}")
    if len(set(holders)) != len(holders) or not all(holder >= 1 for holder in holders):
        raise ValueError("the holders of shares must have different numbers, from 1 up")
    if not 1 <= threshold <= len(holders):
        raise ValueError(
            f"{len(holders)} holders of shares are too few for a threshold of {threshold}"
        )
