"""Decoding of a secret's shares: find the secret and the wrong shares.

The shares of a secret are a word of a generalised Reed-Solomon code: the values of one polynomial
of degree below t, modulo p, at the holders' numbers. The secret is the polynomial's value at 0,
which is decoded as a missing share. Of m shares, any ⌊(m − t) / 2⌋ wrong ones are found in about m²
operations: with the Berlekamp-Massey algorithm (Massey, "Shift-register synthesis and BCH
decoding", IEEE Transactions on Information Theory 15(1), 1969; for these codes: Roth,
"Introduction to Coding Theory", chapter 6).

If more shares are wrong, t right ones still give the secret, and a commitment shows that it is the
right one. But the number of choices of shares grows exponentially, so they are tried only if there
are few, as for sums of ten clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, zip_longest
from math import comb, prod
from typing import Final

from potluck.secagg.protocol.primitives.sharing import PRIME, SECRET_BYTES

_MOST_WORK: Final = 5_000
"""Maximum number of choices of e shares to leave out, times m − t. It takes about 0.3 seconds, and
is enough for any two wrong shares if m = t + 2 and m ≤ 71."""


def decodings(
    shares: Mapping[int, int], threshold: int, doubtful: Collection[int] = ()
) -> Iterator[tuple[bytes, frozenset[int]]]:
    """Yield possible secrets, each with the holders whose shares are wrong if it is the right one.

    shares: numbers in [0, p), by holder's number ≥ 1. threshold: t, at least 1. doubtful: holders
    of wrong shares of other secrets.

    If at most ⌊(m − t) / 2⌋ of the m shares are wrong, the first secret is the right one and its
    holders are exactly those of the wrong shares. Otherwise any secret may be wrong, so check each
    against a commitment. Yields nothing for fewer than t shares.
    """
    holders = sorted(shares)
    spare = len(holders) - threshold
    if spare < 0:
        return
    syndromes = _syndromes(shares, spare + 1)
    for left_out in _choices(holders, spare, doubtful):
        missing = (0, *left_out)
        locator = _shortest_recurrence(_convolved(_polynomial(missing), syndromes))
        found = [x for x in holders if x not in left_out and _value(locator, x) == 0]
        if len(found) != len(locator) - 1 or 2 * len(found) > spare - len(left_out):
            continue
        replaced = (*missing, *found)
        residues = {x: _residue(x, replaced, syndromes) for x in missing}
        # The residue of x is the error at x, times the weight of x among x and the kept holders.
        secret = -residues.pop(0) * prod(-x for x in holders if x not in replaced) % PRIME
        if secret.bit_length() <= 8 * SECRET_BYTES:
            wrong = frozenset(found).union(x for x, residue in residues.items() if residue)
            yield secret.to_bytes(SECRET_BYTES, "big"), wrong


def _choices(
    holders: Sequence[int], spare: int, doubtful: Collection[int]
) -> Iterator[tuple[int, ...]]:
    """Yield holders to leave out: none, then the doubtful ones, then all choices of e holders, for
    growing e.

    With e holders left out, ⌊(spare − e) / 2⌋ further wrong shares are found. So an e that makes
    spare − e odd finds no more than e − 1.
    """
    yield ()
    known = tuple(x for x in holders if x in doubtful)
    if 0 < len(known) <= spare:
        yield known
    for number in range(2 - spare % 2, spare + 1, 2):
        if comb(len(holders), number) * spare > _MOST_WORK:
            return
        yield from combinations(holders, number)


def _syndromes(shares: Mapping[int, int], number: int) -> list[int]:
    """Return Σ w(x)·s(x)·x^j for j = 0 … number − 1, over the shares s(x) and a share 0 at x = 0.

    Each is the same sum over the errors of these shares, since for right ones it is zero.
    """
    holders = tuple(sorted(shares))
    weights = _weights(holders)
    terms = [weight * shares[x] % PRIME for x, weight in zip(holders, weights, strict=True)]
    syndromes = []
    for _ in range(number):
        syndromes.append(sum(terms) % PRIME)
        terms = [term * x % PRIME for x, term in zip(holders, terms, strict=True)]
    return syndromes


@lru_cache(maxsize=512)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return w(x) = 1 / Π (x − z) for each holder x, over 0 and all other holders z, modulo p."""
    points = (0, *holders)
    return tuple(pow(prod(x - z for z in points if z != x), -1, PRIME) for x in holders)


def _shortest_recurrence(sequence: Sequence[int]) -> list[int]:
    """Return 1, c₁, …, c_L of the shortest s[n] + c₁·s[n−1] + … + c_L·s[n−L] = 0 (mod p).

    It holds for n = L … len(sequence) − 1 (Massey 1969, algorithm 2). If s[n] = Σ eᵢ·xᵢⁿ with L
    different xᵢ, and 2L ≤ len(sequence), then c is Π (z − xᵢ), highest power first.
    """
    current, before = [1], [1]
    length, age, inverse = 0, 1, 1
    for n in range(len(sequence)):
        wrong_by = sum(c * sequence[n - i] for i, c in enumerate(current[: n + 1])) % PRIME
        if wrong_by:
            factor = wrong_by * inverse
            shifted = [0] * age + before
            corrected = [
                (c - factor * b) % PRIME for c, b in zip_longest(current, shifted, fillvalue=0)
            ]
            if 2 * length <= n:
                length, age, inverse = n + 1 - length, 0, pow(wrong_by, -1, PRIME)
                before = current
            current = corrected
        age += 1
    return (current + [0] * length)[: length + 1]


def _residue(point: int, replaced: Sequence[int], syndromes: Sequence[int]) -> int:
    """Return Σ w(x)·e(x)·Π (x − z) over all x, and over the replaced z other than `point`.

    e(x) is the error at x. Only `point` contributes, since the errors of the other replaced ones
    are multiplied by zero.
    """
    return _convolved(_polynomial(z for z in replaced if z != point), syndromes)[0]


def _convolved(polynomial: Sequence[int], syndromes: Sequence[int]) -> list[int]:
    """Return the syndromes of the errors e(x)·polynomial(x); there are deg(polynomial) fewer."""
    return [
        sum(c * s for c, s in zip(polynomial, syndromes[j:], strict=False)) % PRIME
        for j in range(len(syndromes) - len(polynomial) + 1)
    ]


def _polynomial(roots: Iterable[int]) -> list[int]:
    """Return the coefficients of Π (z − root) modulo p, lowest power first."""
    coefficients = [1]
    for root in roots:
        lower, same = [0, *coefficients], [*coefficients, 0]
        coefficients = [(a - root * b) % PRIME for a, b in zip(lower, same, strict=True)]
    return coefficients


def _value(coefficients: Sequence[int], at: int) -> int:
    """Return the value modulo p of a polynomial, given its coefficients, highest power first."""
    value = 0
    for coefficient in coefficients:
        value = (value * at + coefficient) % PRIME
    return value
