"""Decoding of shares: which wrong ones are found, and that a commitment shows the right secret."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.share_decoding import decodings

Error = Callable[[int, random.Random], int]
"""Function that returns the wrong share that a holder sends, other than the right one."""

ERRORS: list[Error] = [
    lambda share, generator: (share + 1) % sharing.PRIME,
    lambda share, generator: (share + generator.randrange(1, sharing.PRIME)) % sharing.PRIME,
    lambda share, generator: 0 if share else 1,
]


def dealt(generator: random.Random, number: int, threshold: int) -> tuple[bytes, dict[int, int]]:
    """Return a secret and its shares, for holders with random numbers up to 200."""
    secret = generator.randbytes(32)
    holders = generator.sample(range(1, 201), number)
    shares = sharing.share(secret, threshold, holders, generator.randbytes)
    return secret, dict(zip(holders, shares, strict=True))


def spoil(
    shares: dict[int, int], holders: Iterable[int], error: Error, generator: random.Random
) -> None:
    for holder in holders:
        shares[holder] = error(shares[holder], generator)


@st.composite
def numbers_of_shares(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw numbers of shares m, needed shares t, and wrong shares up to m."""
    m = draw(st.integers(1, 40))
    return m, draw(st.integers(1, m)), draw(st.integers(0, m))


@settings(deadline=None)
@given(
    numbers=numbers_of_shares(),
    error=st.sampled_from(ERRORS),
    doubted=st.integers(0, 4),
    seed=st.integers(0),
)
def test_wrong_shares_up_to_the_radius_are_found_and_the_secret_is_first(
    numbers: tuple[int, int, int], error: Error, doubted: int, seed: int
) -> None:
    m, threshold, most = numbers
    generator = random.Random(seed)
    secret, shares = dealt(generator, m, threshold)
    wrong = frozenset(generator.sample(sorted(shares), min(most, (m - threshold) // 2)))
    spoil(shares, wrong, error, generator)
    doubtful = generator.sample(range(1, 201), doubted)
    assert next(decodings(shares, threshold, doubtful)) == (secret, wrong)


@settings(deadline=None, max_examples=50)
@given(numbers=numbers_of_shares(), seed=st.integers(0))
def test_any_number_of_wrong_shares_gives_the_committed_secret_or_nothing(
    numbers: tuple[int, int, int], seed: int
) -> None:
    m, threshold, most = numbers
    generator = random.Random(seed)
    secret, shares = dealt(generator, m, threshold)
    wrong = frozenset(generator.sample(sorted(shares), most))
    spoil(shares, wrong, ERRORS[1], generator)
    committed = hashlib.sha256(secret).digest()
    found = [
        holders
        for value, holders in decodings(shares, threshold)
        if hashlib.sha256(value).digest() == committed
    ]
    assert set(found) <= {wrong}
    assert found or len(wrong) > (m - threshold) // 2


@settings(deadline=None, max_examples=50)
@given(threshold=st.integers(1, 8), spare=st.integers(0, 4), seed=st.integers(0))
def test_few_shares_give_the_secret_if_as_many_as_the_threshold_are_right(
    threshold: int, spare: int, seed: int
) -> None:
    generator = random.Random(seed)
    secret, shares = dealt(generator, threshold + spare, threshold)
    wrong = frozenset(generator.sample(sorted(shares), spare))
    spoil(shares, wrong, ERRORS[0], generator)
    assert (secret, wrong) in decodings(shares, threshold)


def test_doubtful_holders_are_left_out_but_not_named_if_their_shares_are_right() -> None:
    generator = random.Random(1)
    secret, shares = dealt(generator, 60, 40)
    holders = sorted(shares)
    wrong, right = holders[:15], holders[15:20]
    spoil(shares, wrong, ERRORS[0], generator)  # more than the 10 that are found without a hint
    assert list(decodings(shares, 40)) == []
    assert next(decodings(shares, 40, {*wrong, *right})) == (secret, frozenset(wrong))
    # 12 are left out, and 3 of the other 48 are found.
    assert next(decodings(shares, 40, wrong[:12])) == (secret, frozenset(wrong))
    # More doubtful holders than may be left out are not used.
    assert list(decodings(shares, 40, holders)) == []


@pytest.mark.parametrize("liars", [[], [60], range(0, 126, 6)])
def test_shares_of_128_clients_are_decoded(liars: Iterable[int]) -> None:
    generator = random.Random(2)
    secret, shares = dealt(generator, 128, 86)
    wrong = frozenset(sorted(shares)[place] for place in liars)
    spoil(shares, wrong, ERRORS[1], generator)
    assert next(decodings(shares, 86)) == (secret, wrong)


def test_fewer_shares_than_the_threshold_decode_to_nothing() -> None:
    _, shares = dealt(random.Random(3), 4, 4)
    assert list(decodings(dict(list(shares.items())[:3]), 4)) == []


def test_decoded_number_of_more_than_32_bytes_is_not_a_secret() -> None:
    # All shares are on a constant polynomial whose value has 257 bits.
    assert list(decodings(dict.fromkeys(range(1, 6), sharing.PRIME - 1), 1)) == []
