"""Clustered sampling: the distributions of both algorithms, and each client's expected share."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.populations import context, facts_of, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Population, Selection, UpdateFact
from potluck.server.selectors.updates.clustered_sampling import (
    ClusteredSampling,
    Distribution,
    by_similarity,
    by_size,
)
from potluck.server.selectors.updates.update_memory import angles


def with_samples(*samples: int) -> Population:
    return dataclasses.replace(population(len(samples)), samples=np.array(samples))


def dense(places: list[Distribution], clients: int) -> np.ndarray:
    table = np.zeros((len(places), clients))
    for row, place in zip(table, places, strict=True):
        np.add.at(row, place.positions, place.masses)
    return table


def test_algorithm_1_fills_sampling_distributions_by_client_size() -> None:
    masses = 2 * np.array([4, 3, 2, 1]) / 10
    assert dense(by_size(masses, 2), 4) == pytest.approx(
        np.array([[0.8, 0.2, 0, 0], [0, 0.4, 0.4, 0.2]])
    )


def test_algorithm_2_groups_similar_clients_in_one_sampling_distribution() -> None:
    alike = np.array([0, 1, 0, 1, 2])
    distances = (alike[:, None] != alike[None]).astype(float)
    masses = 2 * np.array([2, 3, 2, 2, 1]) / 10
    assert dense(by_similarity(distances, masses, 2), 5) == pytest.approx(
        np.array([[0, 0.6, 0, 0.4, 0], [0.4, 0, 0.4, 0, 0.2]])
    )


def test_client_larger_than_one_sampling_distribution_fills_its_own() -> None:
    masses = 3 * np.array([12, 2, 2, 2]) / 18
    table = dense(by_similarity(angles(np.eye(4)), masses, 3), 4)
    assert table[:2].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert table[2] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    count=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_sampling_distributions_sum_to_1_and_clients_to_their_sample_share(
    samples: list[int], count: int, seed: int
) -> None:
    sizes = np.array(samples, dtype=float)
    masses = count * sizes / sizes.sum()
    vectors = np.random.default_rng(seed).normal(size=(len(sizes), 3))
    for places in (by_size(masses, count), by_similarity(angles(vectors), masses, count)):
        table = dense(places, len(sizes))
        assert table.sum(axis=1) == pytest.approx(np.ones(count), abs=1e-6)
        assert table.sum(axis=0) == pytest.approx(masses, abs=1e-6)


def draws(selection: Selection) -> dict[int, float]:
    assert selection.weights is not None
    return dict(zip(selection.rows.tolist(), selection.weights.tolist(), strict=True))


def test_unbiased_draws_have_the_sample_shares_as_mean() -> None:
    federation, selector = with_samples(4, 3, 2, 1), ClusteredSampling(unbiased=True)
    state, total = selector.init(federation), np.zeros(4)
    for number in range(1, 4001):
        chosen = draws(select(selector, state, context(federation, 2, number=number)))
        assert sum(chosen.values()) == 2
        for row, drawn in chosen.items():
            total[row] += drawn
    assert total / 4000 == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.03)


def test_client_drawn_twice_trains_once_with_double_weight() -> None:
    federation, selector = with_samples(98, 1, 1), ClusteredSampling(unbiased=True)
    chosen = select(selector, selector.init(federation), context(federation, 3))
    assert draws(chosen)[0] >= 2
    assert len(chosen.rows) < 3
    drawn_again = select(ClusteredSampling(), selector.init(federation), context(federation, 3))
    assert sorted(drawn_again.rows.tolist()) == [0, 1, 2]
    assert draws(drawn_again) == {0: 98, 1: 1, 2: 1}  # all are chosen, so samples decide


def test_clustered_sampling_refuses_sample_weights_of_unbiased_draws() -> None:
    with pytest.raises(ConfigurationError, match='set weights = "equal"'):
        ClusteredSampling(unbiased=True, weights="samples")


def test_mean_weight_of_clients_equals_their_sample_share_where_possible() -> None:
    sizes = np.repeat([400, 50, 10], [4, 20, 100])  # groups of 1600, 1000 and 1000 samples
    federation, selector = with_samples(*sizes.tolist()), ClusteredSampling()
    state, weight = selector.init(federation), defaultdict[int, float](float)
    for number in range(1, 8_001):
        chosen = draws(select(selector, state, context(federation, 6, number=number)))
        for row, drawn in chosen.items():
            weight[int(sizes[row])] += drawn / sum(chosen.values()) / 8_000
    assert weight == pytest.approx({400: 16 / 36, 50: 10 / 36, 10: 10 / 36}, rel=0.03)


def test_clustered_sampling_sets_no_weights_with_the_samples_option() -> None:
    federation, selector = with_samples(4, 3, 2, 1), ClusteredSampling(weights="samples")
    assert not selector.sets_weights
    assert ClusteredSampling().sets_weights
    assert select(selector, selector.init(federation), context(federation, 2)).weights is None


def test_clients_with_parallel_updates_share_a_sampling_distribution() -> None:
    selector, federation = ClusteredSampling(by="updates"), with_samples(*[5] * 6)
    assert selector.needs_facts == {UpdateFact.SKETCH}
    assert ClusteredSampling().needs_facts == set()
    state = selector.init(federation)
    everybody = select(selector, state, context(federation, 6))
    ways = np.array([(1, 0), (0, 1), (-1, -1)])[everybody.rows % 3] * (1 + everybody.rows)[:, None]
    ended = outcome(1, everybody)
    ended = dataclasses.replace(ended, facts=facts_of(ways, rows=everybody.rows))
    state = selector.observe(state, ended)
    for number in range(2, 30):
        chosen = select(selector, state, context(federation, 3, number=number))
        assert sorted(row % 3 for row in chosen.rows.tolist()) == [0, 1, 2]


def test_clustered_sampling_by_updates_refuses_more_than_3000_clients() -> None:
    selector, federation = ClusteredSampling(by="updates"), population(3001)
    with pytest.raises(
        ConfigurationError, match="supports up to 3,000 clients, but the run has 3,001"
    ):
        select(selector, selector.init(federation), context(federation, 3))
    assert len(select(ClusteredSampling(), selector.init(federation), context(federation, 3)).rows)
