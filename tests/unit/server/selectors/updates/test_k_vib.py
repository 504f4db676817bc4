"""K-Vib's probabilities against conditions of an optimum, and its draws against frequencies."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.populations import context, facts_of, population

from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.selectors.parts.inclusion import least_variance, systematic
from potluck.server.selectors.updates.k_vib import KVib
from potluck.server.state import State


def select(selector: KVib, state: State, given_context: SelectionContext) -> Selection:
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


def test_shares_of_samples_count() -> None:
    federation = replace(population(2), samples=np.array([30, 10]))
    state = KVib().init(federation)
    assert state.arrays["shares"].tolist() == [1.5, 0.5]
    both = select(KVib(), state, context(federation, 2))
    assert both.weights is not None
    found = dict(zip(both.rows.tolist(), both.weights.tolist(), strict=True))
    assert found == pytest.approx({0: 1.5, 1: 0.5})


def test_a_hundred_thousand_clients_take_seconds() -> None:
    federation, selector = population(100_000), KVib()
    state = selector.init(federation)
    values = np.random.default_rng(1).uniform(0, 9, 100_000)
    state = State(scalars={"sum": 9.0, "number": 3}, arrays={**state.arrays, "feedback": values})
    started = time.process_time()
    assert len(select(selector, state, context(federation, 1000)).rows) == 1000
    assert time.process_time() - started < 20
