import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.populations import context, facts_of, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Floats, Population, Selector
from potluck.server.selectors.updates.delta import Delta, shared
from potluck.server.state import State


def federation(samples: list[int]) -> Population:
    return replace(population(len(samples)), samples=np.array(samples, dtype=np.int64))


def authors_chances(
    chances: list[float], gradients: Floats, samples: list[float], beta: float
) -> list[float]:
    """Return new chances as the authors' practical algorithm does, over lists of clients."""
    mean = sum(gradients) / len(gradients)
    total = sum(samples)
    apart = gradients - mean
    size = np.linalg.norm
    lengths = [n / total * float(size(g)) for n, g in zip(samples, gradients, strict=True)]
    away = [n / total * float(size(d)) for n, d in zip(samples, apart, strict=True)]
    weights = [(1 - beta) * a + beta * b for a, b in zip(lengths, away, strict=True)]
    return [weight / sum(weights) * sum(chances) for weight in weights]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_probabilities_are_those_of_the_authors_program(beta: float) -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        steps = generator.integers(1, 6, 4)
        gradients, samples = generator.normal(size=(4, 9)), generator.uniform(1, 50, 4)
        before = generator.uniform(0.2, 2, 4)
        given = replace(facts_of(gradients * steps[:, None]), steps=steps)
        expected = authors_chances(before.tolist(), gradients, samples.tolist(), beta)
        assert shared(before, samples, given, beta) == pytest.approx(expected)


def test_a_round_by_hand() -> None:
    """Updates (2, 0), (0, 2), (2, 2) of two steps have lengths 1, 1, √2 per step, and distances
    .745, .745 and .471 to their mean (2/3, 2/3). With β = 1 and equal samples the shares are .380,
    .380 and .240."""
    selector = Delta(diversity=1.0, weights="samples")
    clients = federation([10] * 5)
    state = selector.init(clients)
    selection = select(selector, state, context(clients, 3))
    ended = replace(
        outcome(1, selection), facts=facts_of([[2, 0], [0, 2], [2, 2]], rows=selection.rows)
    )
    after = selector.observe(state, ended).arrays["chances"]
    assert after[selection.rows] == pytest.approx([1.13962, 1.13962, 0.72076], abs=1e-5)
    others = np.setdiff1d(np.arange(5), selection.rows)
    assert after[others].tolist() == [1.0, 1.0]
    assert after.sum() == pytest.approx(5)


@pytest.mark.parametrize("weights", ["inverse", "samples"])
def test_samples_are_found_where_the_selector_sets_the_weights(weights: str) -> None:
    """If the selector sets weights, the facts hold these as samples; the state is the same."""
    clients = federation([10, 40, 20, 30])
    selector = create(Selector, "delta", {"weights": weights})
    chances = np.array([0.5, 1.0, 2.0, 0.5])
    state = State(arrays={"chances": chances})
    selection = select(selector, state, context(clients, 3))
    updates = np.random.default_rng(3).normal(size=(4, 6))[selection.rows]
    samples = clients.samples[selection.rows].astype(np.float64)
    given = replace(
        facts_of(updates, rows=selection.rows),
        samples=samples if selection.weights is None else selection.weights,
    )
    ended = outcome(1, selection, samples=clients.samples)
    after = selector.observe(state, replace(ended, facts=given))
    before = chances[selection.rows].tolist()
    expected = authors_chances(before, updates, samples.tolist(), 0.5)
    assert after.arrays["chances"][selection.rows] == pytest.approx(expected)


def test_weights_are_inverse_to_the_probabilities() -> None:
    clients = federation([10, 40, 0])
    state = State(arrays={"chances": np.array([0.5, 2.0, 1.0])})
    inverse = np.array([20.0, 20.0, 25.0])  # client 2's samples are unknown: the mean, 25
    for seed in range(10):
        selection = select(Delta(), state, context(clients, 2, seed=seed))
        assert selection.weights is not None
        assert selection.weights.tolist() == inverse[selection.rows].tolist()
    assert select(Delta(weights="samples"), state, context(clients, 3)).weights is None


def test_the_expected_weight_of_a_single_draw_is_the_share_of_samples() -> None:
    """4000 draws of one client each, within four standard deviations."""
    clients = federation([10, 40, 50])
    state = State(arrays={"chances": np.array([2.0, 0.5, 0.5])})
    totals = np.zeros(3)
    draws = 4000
    for seed in range(draws):
        selection = select(Delta(), state, context(clients, 1, seed=seed))
        assert selection.weights is not None
        totals[selection.rows] += selection.weights
    chances = np.array([2.0, 0.5, 0.5]) / 3
    expected = draws * clients.samples / 3
    deviations = clients.samples / (3 * chances) * np.sqrt(draws * chances * (1 - chances))
    assert (np.abs(totals - expected) < 4 * deviations).all()


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_updates_without_a_size_change_nothing(value: float) -> None:
    before = np.array([0.5, 1.5])
    assert shared(before, np.ones(2), facts_of([[value], [value]]), 0.5) is before


def test_a_client_whose_update_is_zero_can_be_drawn_again() -> None:
    found = shared(np.ones(2), np.ones(2), facts_of([[0.0, 0.0], [3.0, 4.0]]), 0.0)
    assert found.tolist() == [pytest.approx(1e-6), 2.0]


@pytest.mark.parametrize("options", [{"diversity": 1.5}, {"weights": "equal"}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "delta", options)


def test_clients_that_are_all_drawn_are_weighted_by_their_samples() -> None:
    selector, clients = Delta(), federation([10, 20, 30])
    state = State(arrays={"chances": np.array([0.1, 1.4, 1.5])})
    selection = select(selector, state, context(clients, 3))
    assert selection.weights == pytest.approx(np.array([10, 20, 30])[selection.rows])
    ended = outcome(1, selection, samples=[10, 20, 30])
    vectors = np.eye(3)[selection.rows]
    facts = replace(facts_of(vectors, rows=selection.rows), samples=selection.weights)
    after = selector.observe(state, replace(ended, facts=facts)).arrays["chances"]
    assert after == pytest.approx(np.array([10, 20, 30]) / 60 * 3)  # updates are alike


def plain_draw(chances: Mapping[int, float], size: int, twin: np.random.Generator) -> list[int]:
    """Draw without replacement: the clients whose exponential waiting times, with their chances as
    rates, end first."""
    first = twin.exponential(size=(2, len(chances))).tolist()[0]
    waits = {row: first[place] / chance for place, (row, chance) in enumerate(chances.items())}
    return sorted(waits, key=lambda row: waits[row])[:size]


class PlainDelta:
    """DELTA in plain loops. chances: P of each client that was known after the last round."""

    def __init__(self, clients: int, diversity: float) -> None:
        self.chances, self.diversity = [1.0] * clients, diversity

    def all_chances(self, clients: int) -> list[float]:
        """Return P of all clients. New clients have the mean of the others."""
        mean = sum(self.chances) / len(self.chances)
        return self.chances + [mean] * (clients - len(self.chances))

    def learn(self, clients: int, steps: Mapping[int, Sequence[float]], n: Sequence[float]) -> None:
        """Redistribute P among the clients of a round. steps: updates per step. n: samples."""
        self.chances = self.all_chances(clients)
        mean = [sum(column) / len(steps) for column in zip(*steps.values(), strict=True)]
        importance = {
            row: n[row]
            * ((1 - self.diversity) * math.hypot(*g) + self.diversity * math.dist(g, mean))
            for row, g in steps.items()
        }
        if not any(importance.values()):  # a single update, or all are 0
            return
        shared = sum(self.chances[row] for row in steps)
        for row, each in importance.items():
            self.chances[row] = max(shared * each / sum(importance.values()), 1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"diversity": 0.0}, {"diversity": 1.0}, {"diversity": 0.3, "weights": "samples"}],
)
def test_rounds_agree_with_a_second_implementation(options: dict[str, Any], seed: int) -> None:
    """Some clients are unavailable, some updates fail or are 0, and clients 8 and 9 join in round
    5. Each number of samples is known after the client's first update."""
    generator, selector = np.random.default_rng(seed), create(Selector, "delta", options)
    plain, state = PlainDelta(8, options.get("diversity", 0.5)), selector.init(population(8))
    sizes, known = generator.integers(1, 50, 10), np.zeros(10, dtype=np.int64)
    for number in range(1, 21):
        clients = 10 if number >= 5 else 8
        here = np.flatnonzero(generator.random(clients) < 0.75)
        roster = federation(known[:clients].tolist())
        given = context(roster, 5, number=number, seed=seed, available=here)
        selection = select(selector, state, given)
        chances = plain.all_chances(clients)
        some = {row: chances[row] for row in here.tolist()}
        assert selection.rows.tolist() == plain_draw(some, 5, given.generator("delta"))
        usual = float(known[known > 0].mean()) if known.any() else 1.0
        n = [float(size) or usual for size in known.tolist()]
        if "weights" in options:
            assert selection.weights is None
        else:
            every = len(here) <= 5
            expected = [n[row] / (1 if every else chances[row]) for row in selection.rows.tolist()]
            assert selection.weights == pytest.approx(expected)

        came = generator.random(len(selection.rows)) < 0.8
        rows, steps = selection.rows[came], generator.integers(1, 6, 10)
        updates = generator.standard_normal((10, 4)) * generator.choice([0, 1, 3], (10, 1))
        facts = replace(facts_of(updates[rows], rows=rows, number=number), steps=steps[rows])
        told = known.copy()
        known[rows] = sizes[rows]
        if selection.weights is not None:
            facts = replace(facts, samples=selection.weights[came])
        else:  # an update says on how many samples it rests
            facts = replace(facts, samples=known[rows].astype(np.float64))
            n = [float(size) for size in known.tolist()]
        ended = outcome(number, selection, samples=told[:clients])
        state = selector.observe(state, replace(ended, facts=facts, included=rows))
        per_step = {row: (updates[row] / steps[row]).tolist() for row in rows.tolist()}
        plain.learn(max(len(plain.chances), 1 + max(selection.rows)), per_step, n)
        assert state.arrays["chances"] == pytest.approx(plain.chances)
    assert min(plain.chances) < 0.5 < 1.5 < max(plain.chances)
