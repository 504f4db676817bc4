"""TiFL's tiers, credits and probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from support.populations import context, played, population

from potluck.server.selection import Answers, Ask, RoundOutcome, Selection
from potluck.server.selectors.asking.tifl import TiFL, by_loss, ranked_again
from potluck.server.state import State

CLIENTS = 6
PLAIN = TiFL(tiers=3, interval=2, asked=0)


def known(selector: TiFL = PLAIN, clients: int = CLIENTS) -> State:
    """Return a state in which client i took i + 1 seconds."""
    fresh = selector.init(population(clients))
    seen = np.ones(clients, dtype=np.int64)
    seconds = np.arange(clients) + 1.0
    arrays = {**fresh.arrays, "seconds": seconds, "times": seen, "tried": seen}
    return State(scalars=fresh.scalars, arrays=arrays)


def ended(number: int, selection: Selection, answers: Sequence[Answers] = ()) -> RoundOutcome:
    """Return the outcome of a round in which client i took i + 1 seconds."""
    return RoundOutcome(
        round=number,
        selected=selection.rows,
        included=selection.rows,
        seconds=(selection.rows + 1).astype(np.float64),
        answers=answers,
    )


def test_probabilities_fall_with_the_loss() -> None:
    assert by_loss(np.array([1.0, 3.0, 2.0])).tolist() == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert by_loss(np.array([np.nan, 0.5])).tolist() == pytest.approx([1 / 3, 2 / 3])


def test_all_clients_are_tried_first() -> None:
    selector, federation = TiFL(tiers=2), population(5)
    state, seen = selector.init(federation), []
    for number in (1, 2, 3):
        selection, _ = played(selector, state, context(federation, 2, number=number))
        seen += selection.rows.tolist()
        state = selector.observe(state, ended(number, selection))
    assert set(seen) == set(range(5))


def test_a_cohort_is_of_one_tier_and_filled_from_its_neighbours() -> None:
    federation, tiers = population(CLIENTS), [{0, 1}, {2, 3}, {4, 5}]
    found = set()
    for number in range(1, 40, 2):
        selection, _ = played(PLAIN, known(), context(federation, 2, number=number))
        assert set(selection.rows.tolist()) in tiers
        found.add(min(selection.rows.tolist()))
        larger, _ = played(PLAIN, known(), context(federation, 4, number=number))
        assert set(larger.rows[:2].tolist()) in tiers
        assert "added from tier" in larger.reasons[3]
    assert found == {0, 2, 4}


def test_tiers_get_new_probabilities_only_if_the_last_one_has_not_improved() -> None:
    federation, state = population(CLIENTS), known()
    losses = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0, 4: 2.0, 5: 2.0}

    def answer(ask: Ask) -> Answers:
        told = np.array([losses[row] for row in ask.rows.tolist()])
        return Answers(rows=ask.rows, values={"loss": told})

    def next_round(number: int, state: State) -> State:
        selection, answers = played(PLAIN, state, context(federation, 2, number=number), answer)
        assert len(answers) == (number % 2 == 0)
        return PLAIN.observe(state, ended(number, selection, answers))

    for number in (1, 2):
        state = next_round(number, state)
    assert state.arrays["losses"].tolist()[1] == 3.0
    assert state.arrays["probabilities"].tolist() == pytest.approx([1 / 3] * 3)
    losses = {row: loss / 2 for row, loss in losses.items()}
    for number in (3, 4):
        state = next_round(number, state)
    assert state.arrays["probabilities"].tolist() == pytest.approx([1 / 3] * 3), "all improved"
    for number in (5, 6):
        state = next_round(number, state)
    assert sorted(state.arrays["probabilities"].tolist()) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_a_tier_without_credits_is_used_only_if_none_has_any() -> None:
    federation, selector = population(CLIENTS), TiFL(tiers=3, interval=100, credits=1)
    state, used = known(selector), []
    for number in range(1, 4):
        selection, _ = played(selector, state, context(federation, 2, number=number))
        used.append(int(selection.rows.min()) // 2)
        state = selector.observe(state, ended(number, selection))
    assert sorted(used) == [0, 1, 2]
    selection, _ = played(selector, state, context(federation, 2, number=4))
    assert len(selection.rows) == 2


def test_only_tiers_with_credits_are_ranked() -> None:
    ranks = by_loss(np.array([1.0, 3.0, 2.0, 0.5]))
    found = ranked_again(ranks, np.array([True, False, True, True]))
    assert found.tolist() == pytest.approx([2 / 6, 0, 3 / 6, 1 / 6])
    even = np.full(3, 1 / 3)
    assert ranked_again(even, np.array([True, False, True])).tolist() == even.tolist()
    federation, selector = population(CLIENTS), TiFL(tiers=3, interval=100, credits=1)
    state, draws = known(selector), np.zeros(3)
    arrays = {"used": np.array([0, 1, 0]), "probabilities": by_loss(np.array([1.0, 2.0, 3.0]))}
    state = State(scalars=state.scalars, arrays={**state.arrays, **arrays})
    for number in range(1, 1501):
        selection, _ = played(selector, state, context(federation, 2, number=number))
        draws[int(selection.rows.min()) // 2] += 1
    assert draws / 1500 == pytest.approx([1 / 3, 0, 2 / 3], abs=0.04)


def test_a_client_that_failed_is_in_the_slowest_tier() -> None:
    federation, selector = population(3), TiFL(tiers=3)
    outcome = RoundOutcome(
        round=1, selected=np.arange(3), included=np.array([1, 2]), seconds=np.array([np.nan, 9, 5])
    )
    state = selector.observe(selector.init(federation), outcome)
    assert [rows.tolist() for rows in selector._groups(state)] == [[2], [1], [0]]


def test_a_hundred_thousand_clients_take_seconds() -> None:
    clients = 100_000
    started = time.process_time()
    selection, _ = played(TiFL(), known(TiFL(), clients), context(population(clients), 1000))
    assert len(selection.rows) == 1000
    assert time.process_time() - started < 20
