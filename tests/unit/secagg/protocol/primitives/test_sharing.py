"""Shares, thresholds, neighbours, and the encrypted channel for shares."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import (
    SessionKeys,
    SharePair,
    open_pair,
    seal_pair,
)
from potluck.secagg.protocol.primitives.graph import neighbours
from potluck.secagg.protocol.primitives.thresholds import (
    circulant_is_safe,
    circulant_thresholds,
    colluding_clients,
    complete_thresholds,
    majority,
)
from potluck.secagg.protocol.rules import BrokenRuleError, Rule

SECRET = bytes(range(32))


def interpolated(shares: dict[int, int], at: int) -> int:
    """Return the share of holder `at`, on the same polynomial as these shares."""
    weights = sharing.lagrange_weights(tuple(shares), at)
    terms = (w * share for w, share in zip(weights, shares.values(), strict=True))
    return sum(terms) % sharing.PRIME


def test_secret_shares_equal_the_published_vector() -> None:
    value = int.from_bytes(SECRET, "big")
    assert sharing.evaluate(SECRET, [7, 11], [1, 2, 5]) == [value + 18, value + 58, value + 310]


def test_field_prime_is_the_smallest_above_all_secrets() -> None:
    # Fermat's test for a few bases suffices, since the number is known to be prime.
    assert all(pow(base, sharing.PRIME - 1, sharing.PRIME) == 1 for base in (2, 3, 5, 7, 11))
    for offset in range(1, 297, 2):
        assert pow(3, 2**256 + offset - 1, 2**256 + offset) != 1


@settings(deadline=None)
@given(
    secret=st.binary(min_size=32, max_size=32),
    threshold=st.integers(1, 8),
    extra=st.integers(0, 5),
    seed=st.integers(),
)
def test_any_shares_up_to_the_threshold_reconstruct_the_secret(
    secret: bytes, threshold: int, extra: int, seed: int
) -> None:
    generator = random.Random(seed)
    holders = generator.sample(range(1, 200), threshold + extra)
    shares = dict(
        zip(
            holders,
            sharing.share(secret, threshold, holders, generator.randbytes),
            strict=True,
        )
    )
    chosen = generator.sample(holders, threshold)
    some = {holder: shares[holder] for holder in chosen}
    assert sharing.combine(some) == secret
    for holder in holders:
        assert interpolated(some, holder) == shares[holder]
        assert sharing.from_bytes(sharing.to_bytes(shares[holder])) == shares[holder]


def test_fewer_shares_than_the_threshold_are_consistent_with_every_secret() -> None:
    # For any secret, there is a polynomial through the secret and two of three shares.
    shares = sharing.share(SECRET, 3, [1, 2, 3], random.Random(1).randbytes)
    for other in (bytes(32), b"\xff" * 32):
        points = {1: shares[0], 2: shares[1], 0: int.from_bytes(other, "big")}
        third = interpolated(points, 3)
        assert sharing.combine({1: shares[0], 2: shares[1], 3: third}) == other


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [(bytes(31), 1, [1]), (SECRET, 3, [1, 2]), (SECRET, 1, [1, 1]), (SECRET, 1, [0])],
)
def test_invalid_sharing_parameters_are_refused(
    secret: bytes, threshold: int, holders: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"bytes|holders"):
        sharing.share(secret, threshold, holders, random.Random(1).randbytes)


def test_secret_shares_outside_the_field_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        sharing.from_bytes(sharing.PRIME.to_bytes(33, "big"))
    with pytest.raises(ValueError, match="33 bytes"):
        sharing.from_bytes(bytes(32))
    # At zero, a polynomial may have a value of 257 bits; a secret never has.
    assert sharing.combine({1: sharing.PRIME - 1}) is None


@pytest.mark.parametrize(("clients", "enough"), [(5, 4), (6, 4), (10, 7), (50, 34), (100, 67)])
def test_complete_graph_has_the_computed_threshold(clients: int, enough: int) -> None:
    found = complete_thresholds([str(index) for index in range(clients)])
    assert (found.degree, found.threshold, found.quorum) == (0, enough, enough)


@settings(deadline=None)
@given(
    hosts=st.lists(st.integers(0, 6), min_size=1, max_size=14),
    colluding_hosts=st.integers(0, 3),
)
def test_any_two_quorums_share_an_honest_client(hosts: list[int], colluding_hosts: int) -> None:
    names = [str(host) for host in hosts]
    quorum = complete_thresholds(names, colluding_hosts).quorum
    for bad in combinations(sorted(set(names)), min(colluding_hosts, len(set(names)))):
        honest = sum(name not in bad for name in names)
        # Two quorums without a common honest client would need more honest clients than there are.
        assert 2 * (quorum - (len(names) - honest)) > honest


def test_colluding_clients_are_counted_on_the_largest_hosts() -> None:
    assert colluding_clients(["x", "y", "y", "z", "z", "z"], 2) == 5
    assert colluding_clients(["x"], 0) == 0
    assert majority(6, 1) == 4


CIRCULANT = {
    (0.05, 0.05): {128: (28, 22), 200: (44, 34), 500: (64, 49), 1000: (76, 58), 2000: (80, 61)},
    (0.1, 0.1): {128: (52, 40), 200: (80, 61), 500: (118, 88), 1000: (134, 99), 2000: (152, 112)},
    (0.2, 0.1): {
        128: (74, 62),
        200: (106, 86),
        500: (166, 130),
        1000: (202, 157),
        2000: (224, 173),
    },
}


@pytest.mark.parametrize("rates", CIRCULANT)
def test_circulant_graph_has_the_smallest_safe_threshold(rates: tuple[float, float]) -> None:
    for clients, expected in CIRCULANT[rates].items():
        colluding, dropping = (int(rate * clients) for rate in rates)
        found = circulant_thresholds(clients, colluding, dropping)
        assert found is not None
        assert (found.degree, found.threshold) == expected
        assert circulant_is_safe(clients, colluding, found.degree, found.threshold)
        assert not circulant_is_safe(clients, colluding, found.degree, found.degree // 2)


def test_no_circulant_graph_exists_for_few_clients() -> None:
    assert circulant_thresholds(10, 3, 1) is None


@settings(deadline=None)
@given(
    clients=st.integers(2, 40), half=st.integers(0, 25), seed=st.binary(min_size=32, max_size=32)
)
def test_neighbours_are_mutual_and_of_the_requested_number(
    clients: int, half: int, seed: bytes
) -> None:
    names = [f"c{index}" for index in range(clients)]
    found = neighbours(names, 2 * half, seed)
    for name, others in found.items():
        assert name not in others
        assert all(name in found[other] for other in others)
        assert len(others) == (2 * half if 0 < 2 * half < clients - 1 else clients - 1)


def test_neighbour_ring_depends_only_on_seed_and_names() -> None:
    names = [f"c{index}" for index in range(40)]
    assert neighbours(names, 4, bytes(32)) != neighbours(names, 4, bytes([1] * 32))
    assert neighbours(names, 4, bytes(32)) == neighbours(names[::-1], 4, bytes(32))


PAIR = SharePair(bytes(33), bytes([0, *[1] * 32]))


def test_sealed_share_pair_opens_only_for_its_direction_and_roster() -> None:
    sealed = seal_pair(PAIR, SECRET, bytes(32), 1, 2)
    assert open_pair(sealed, SECRET, bytes(32), 1, 2) == PAIR
    for other in (
        (SECRET, bytes(32), 2, 1),
        (SECRET, bytes([1] * 32), 1, 2),
        (bytes(32), bytes(32), 1, 2),
        (SECRET, bytes(32), 1, 3),
    ):
        with pytest.raises(BrokenRuleError) as refused:
            open_pair(sealed, *other)
        assert refused.value.rule is Rule.SHARE


def test_share_pair_reveals_one_of_its_two_shares() -> None:
    assert PAIR.take(survived=True) == PAIR.seed_share
    assert PAIR.take(survived=False) == PAIR.mask_key_share


def test_reprs_of_keys_and_shares_contain_no_secrets() -> None:
    keys = SessionKeys.from_random(bytes(96))
    assert "00" not in repr(keys) + repr(PAIR)
    with pytest.raises(ValueError, match="96"):
        SessionKeys.from_random(bytes(95))
