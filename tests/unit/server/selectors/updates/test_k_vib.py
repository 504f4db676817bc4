"""K-Vib against a second implementation, its probabilities against a search, its draws against
frequencies."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_loops import limited
from support.populations import context, facts_of, population

from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.selectors.parts.inclusion import least_variance, systematic
from potluck.server.selectors.updates.k_vib import KVib
from potluck.server.selectors.updates.osmd import Osmd
from potluck.server.state import State


def select(selector: KVib | Osmd, state: State, given_context: SelectionContext) -> Selection:
    return selector.select(state, given_context)


def by_bisection(lengths: list[float], count: int) -> list[float]:
    """Return min(1, s · length) for the s at which they sum to `count`."""
    low, high = 0.0, 1e12
    for _ in range(400):
        middle = (low + high) / 2
        if sum(min(1.0, middle * length) for length in lengths) < count:
            low = middle
        else:
            high = middle
    return [min(1.0, high * length) for length in lengths]


def test_probabilities_by_hand() -> None:
    assert least_variance(np.array([1.0, 2.0, 3.0]), 1).tolist() == pytest.approx(
        [1 / 6, 1 / 3, 0.5]
    )
    assert least_variance(np.array([1.0, 10.0, 1.0]), 2).tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert least_variance(np.zeros(4), 2).tolist() == [0.5] * 4
    assert least_variance(np.array([0.0, 5.0, 0.0]), 2).tolist() == [0.5, 1.0, 0.5]


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.floats(0.01, 1e3), min_size=1, max_size=12), data=st.data())
def test_probabilities_agree_with_a_search(lengths: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    found = least_variance(np.array(lengths), count)
    assert found.tolist() == pytest.approx(by_bisection(lengths, count), rel=1e-6)
    assert found.sum() == pytest.approx(count)


def test_systematic_draws_have_their_probabilities() -> None:
    generator = np.random.default_rng(1)
    chances = np.array([0.1, 0.9, 0.5, 0.2, 1.0, 0.3])
    seen = np.zeros(6)
    for _ in range(4000):
        drawn = systematic(chances, 3, generator)
        assert len(set(drawn.tolist())) == 3
        seen[drawn] += 1
    assert seen / 4000 == pytest.approx(chances, abs=0.03)


class PlainKVib:
    """K-Vib in plain loops. rounds: T. earlier: W of each client. squares: all π² so far."""

    def __init__(self, samples: Sequence[int], *, regularization: float, rounds: int) -> None:
        self.shares = [size * len(samples) / sum(samples) for size in samples]
        self.regularization, self.rounds = regularization, rounds
        self.earlier = [0.0] * len(samples)
        self.squares: list[float] = []

    def probabilities(self, rows: Sequence[int], count: int) -> dict[int, float]:
        theta = min(1.0, (len(rows) / (self.rounds * count)) ** (1 / 3))
        typical = sum(self.squares) / len(self.squares) if self.squares else 0.0
        gamma = self.regularization * typical * len(rows) / (theta * count)
        found, free, places = {}, list(rows), count
        while free:  # p ∝ √(W + γ), and clients for which this is above 1 are certain
            lengths = {row: math.sqrt(self.earlier[row] + gamma) for row in free}
            total = sum(lengths.values())
            for row, length in lengths.items():
                found[row] = places * (length / total if total else 1 / len(free))
            certain = [row for row in free if found[row] > 1]
            if not certain:
                break
            found |= dict.fromkeys(certain, 1.0)
            free = [row for row in free if row not in certain]
            places -= len(certain)
        return {row: (1 - theta) * found[row] + theta * count / len(rows) for row in rows}

    def learn(self, norms: Mapping[int, float], chances: Mapping[int, float]) -> None:
        for row, norm in limited(norms, 100).items():
            square = (self.shares[row] * norm) ** 2
            self.squares.append(square)
            self.earlier[row] += square / chances[row]


def plain_draw(chances: Sequence[float], place: float) -> list[int]:
    """Return the positions at `place`, `place` + 1, …, on a line of segments as long as chances."""
    drawn, end = [], 0.0
    for position, chance in enumerate(chances):
        end += chance
        if end > place:
            drawn.append(position)
            place += 1
    return drawn


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    samples=st.lists(st.integers(1, 50), min_size=2, max_size=9),
    count=st.integers(1, 4),
    regularization=st.sampled_from([0.01, 0.1, 2.0]),
    horizon=st.sampled_from([(0, 0, 1000), (0, 15, 15), (200, 15, 200)]),
    weights=st.sampled_from(["inverse", "samples"]),
)
def test_rounds_agree_with_a_second_implementation(
    seed: int,
    samples: list[int],
    count: int,
    regularization: float,
    horizon: tuple[int, int, int],
    weights: Literal["inverse", "samples"],
) -> None:
    """horizon: the option `rounds`, the rounds of the run, and T."""
    generator, clients = np.random.default_rng(seed), len(samples)
    rounds, of_run, expected = horizon if weights == "inverse" else (200, 15, 200)
    federation = replace(population(clients), samples=np.array(samples))
    selector = KVib(regularization=regularization, rounds=rounds, weights=weights)
    plain = PlainKVib(samples, regularization=regularization, rounds=expected)
    state = selector.init(federation)
    for number in range(1, 13):
        here = np.flatnonzero(generator.random(clients) < 0.8)
        here = here if len(here) else np.arange(clients)
        given_context = replace(
            context(federation, count, number=number, seed=seed, available=here), rounds=of_run
        )
        selection = select(selector, state, given_context)
        size, twin = min(count, len(here)), given_context.generator("k-vib")
        order = twin.permutation(here).tolist()
        chances = plain.probabilities(order, size)
        picks = [
            order[at] for at in plain_draw([chances[row] for row in order], float(twin.random()))
        ]
        assert selection.rows.tolist() == picks
        reported = [float(reason.split()[-1]) for reason in selection.reasons]
        assert reported == pytest.approx([chances[row] for row in picks], rel=0.01)
        sent = np.full(size, 5.0)
        if weights == "inverse":
            assert selection.weights is not None
            sent = np.array([plain.shares[row] / chances[row] for row in picks])
            assert selection.weights == pytest.approx(sent)
        else:
            assert selection.weights is None
            chances = plain.probabilities(range(clients), size)

        arrived = generator.random(size) < 0.8
        norms = generator.lognormal(sigma=2, size=size) * generator.choice([0, 1, 1, 1e4], size)
        facts = facts_of(np.ones((arrived.sum(), 2)), rows=selection.rows[arrived])
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows[arrived],
            seconds=np.ones(size),
            samples=federation.samples,
            facts=replace(facts, norms=norms[arrived], samples=sent[arrived]),
        )
        state = selector.observe(state, ended)
        plain.learn(dict(zip(facts.rows.tolist(), norms[arrived].tolist(), strict=True)), chances)
        assert state.arrays["feedback"] == pytest.approx(plain.earlier)
        assert state.scalars["sum"] == pytest.approx(sum(plain.squares))
        assert state.scalars["number"] == len(plain.squares)


def test_long_updates_are_drawn_more_often_and_weighted_less() -> None:
    federation, selector = population(6), KVib(rounds=10_000, regularization=0.01)
    state = selector.init(federation)
    first = select(selector, state, context(federation, 2))
    assert first.weights is not None
    assert first.weights.tolist() == [3.0, 3.0], "1/p of a uniform draw of 2 of 6"
    found = facts_of(np.diag([8.0, 1, 1, 1, 1, 1, 1, 1, 1])[:6])
    ended = RoundOutcome(
        round=1,
        selected=np.arange(6),
        included=np.arange(6),
        seconds=np.ones(6),
        facts=replace(found, samples=np.full(6, 3.0)),
    )
    state = selector.observe(state, ended)
    assert state.arrays["feedback"].tolist() == pytest.approx([192.0, 3, 3, 3, 3, 3])
    often, weights = np.zeros(6), np.zeros(6)
    for number in range(1, 1001):
        selection = select(selector, state, context(federation, 2, number=number))
        often[selection.rows] += 1
        assert selection.weights is not None
        weights[selection.rows] += selection.weights
    assert often[0] > 3 * often[1:].max()
    assert weights / 1000 == pytest.approx(np.ones(6), abs=0.15), "unbiased"


@pytest.mark.parametrize("selector", [KVib(), Osmd()])
def test_numbers_of_samples_that_become_known_in_the_run_count(selector: KVib | Osmd) -> None:
    """Clients disclose them with their first updates, after the state was made. Unknown numbers
    count as the mean of the known ones."""

    def weights(*samples: int) -> dict[int, float]:
        federation = replace(population(3), samples=np.array(samples))
        everyone = select(selector, state, context(federation, 3))
        assert everyone.weights is not None
        return dict(zip(everyone.rows.tolist(), everyone.weights.tolist(), strict=True))

    state = selector.init(replace(population(3), samples=np.zeros(3, dtype=np.int64)))
    assert weights(0, 0, 0) == pytest.approx({0: 1, 1: 1, 2: 1})
    assert weights(30, 10, 0) == pytest.approx({0: 1.5, 1: 0.5, 2: 1})


def test_a_hundred_thousand_clients_take_seconds() -> None:
    federation, selector = population(100_000), KVib()
    state = selector.init(federation)
    values = np.random.default_rng(1).uniform(0, 9, 100_000)
    state = State(scalars={"sum": 9.0, "number": 3}, arrays={**state.arrays, "feedback": values})
    started = time.process_time()
    assert len(select(selector, state, context(federation, 1000)).rows) == 1000
    assert time.process_time() - started < 20
