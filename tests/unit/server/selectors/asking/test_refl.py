from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.populations import Respond, context, outcome, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, RoundOutcome, Selector
from potluck.server.selectors.asking.refl import Refl, next_mean
from potluck.server.state import State


def telling(chances: Sequence[float], spans: list[tuple[object, object]] | None = None) -> Respond:
    told = np.array(chances, dtype=np.float64)

    def respond(ask: Ask) -> Answers:
        assert (ask.kind, ask.wanted) == ("availability", ("availability",))
        if spans is not None:
            spans.append((ask.parameters["begin"], ask.parameters["end"]))
        return Answers(rows=ask.rows, values={"availability": told[ask.rows]})

    return respond


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.2, 0.2 + 1e-14, 0.5, 1.0]), min_size=1, max_size=20))
def test_refl_selects_the_least_available_clients_first(chances: list[float]) -> None:
    federation = population(len(chances))
    count = (len(chances) + 1) // 2
    chosen = select(Refl(), Refl().init(federation), context(federation, count), telling(chances))
    taken = sorted(round(chances[row], 12) for row in chosen.rows)
    assert taken == sorted(round(chance, 12) for chance in chances)[:count]


def test_refl_draws_among_clients_with_equal_availability_at_random() -> None:
    federation = population(3)
    drawn = Counter(
        int(select(Refl(), Refl().init(federation), context(federation, 1, seed=seed)).rows[0])
        for seed in range(300)
    )
    assert drawn[0] == 300, "k0 answers with the least"
    told = telling([0.3, 0.3, 0.9])
    drawn = Counter(
        int(
            select(Refl(), Refl().init(federation), context(federation, 1, seed=seed), told).rows[0]
        )
        for seed in range(300)
    )
    assert set(drawn) == {0, 1}
    assert 115 <= drawn[0] <= 185  # 150 ± four standard deviations


def test_selected_client_rests_unless_too_few_clients_have_rested() -> None:
    federation, selector = population(8), Refl(rest=2)
    told, state = telling([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), selector.init(population(8))
    cohorts = []
    for number in range(1, 6):
        selection, answers = played(selector, state, context(federation, 3, number=number), told)
        cohorts.append(selection.rows.tolist())
        state = selector.observe(state, outcome(number, selection, answers))
    assert cohorts[:2] == [[0, 1, 2], [3, 4, 5]]
    assert cohorts[2][:2] == [6, 7]
    assert cohorts[2][2] in (0, 1, 2), "the longest rest first"
    again = set(range(3)) - {cohorts[2][2]}
    assert set(cohorts[3][:2]) == again
    assert cohorts[3][2] in (3, 4, 5)
    last, _ = played(selector, state, context(federation, 8, number=6), told)
    assert sum("too few have rested" in reason for reason in last.reasons) > 0


def test_refl_does_not_ask_resting_clients() -> None:
    federation, selector = population(3), Refl()
    first = select(selector, selector.init(federation), context(federation, 2))
    state = selector.observe(selector.init(federation), outcome(1, first))
    asked: list[int] = []

    def respond(ask: Ask) -> Answers:
        asked.extend(ask.rows.tolist())
        return Answers(rows=ask.rows, values={"availability": np.ones(len(ask.rows))})

    select(selector, state, context(federation, 1, number=2), respond)
    assert asked == sorted({0, 1, 2} - set(first.rows.tolist()))


def test_availability_span_follows_the_slowest_training_of_each_round() -> None:
    """μ = 10, then 0.25 · 10 + 0.75 · 30 = 25; a round without updates leaves it unchanged."""
    federation, selector, spans = population(6), Refl(rest=0), list[tuple[object, object]]()
    told, state = telling([0.5] * 6, spans), selector.init(population(6))
    for number, seconds in enumerate([[10.0, 2.0], [30.0, np.nan], [np.nan, np.nan], [1, 1]], 1):
        selection, answers = played(selector, state, context(federation, 2, number=number), told)
        ended = outcome(number, selection, answers)
        state = selector.observe(state, replace(ended, seconds=np.array(seconds)))
    assert spans == [(0.0, 0.0), (10.0, 20.0), (25.0, 50.0), (25.0, 50.0)]
    assert next_mean(8.0, 4.0, 0.25) == 5.0


def test_refl_cohort_is_smaller_by_the_expected_number_of_stragglers() -> None:
    """μ = 10 after round 1. Client 0 took 12 s when it joined: after 10 s more it is due; client 1
    took 40 s and is not; of client 2 nothing is known."""
    federation, selector = population(9), Refl(rest=0)
    none = np.zeros(0, dtype=np.int64)
    state = selector.init(federation)
    first = RoundOutcome(
        round=1,
        selected=np.array([0, 1, 2]),
        included=none,
        seconds=np.array([12.0, 40.0, np.nan]),
    )
    state = selector.observe(state, first)
    state = State(scalars={"clock": 0.0, "mean_seconds": 10.0}, arrays=state.arrays)
    second = RoundOutcome(
        round=2,
        selected=np.array([0, 1, 2, 3]),
        included=none,
        seconds=np.array([np.nan] * 3 + [10]),
    )
    state = selector.observe(state, second)
    for late, size in (([], 5), ([0], 4), ([1], 5), ([2], 4), ([0, 1, 2], 3)):
        given_context = replace(
            context(federation, 5, number=3, available=np.arange(3, 9)), late=np.array(late, int)
        )
        assert len(select(selector, state, given_context).rows) == size
    alone = replace(context(federation, 1, number=3, available=np.arange(3, 9)), late=np.arange(3))
    assert len(select(selector, state, alone).rows) == 1, "never empty"


def test_refl_learns_the_training_duration_of_a_client_from_its_late_update() -> None:
    federation, selector = population(3), Refl()
    ended = RoundOutcome(
        round=1,
        selected=np.array([0]),
        included=np.array([0]),
        seconds=np.array([4.0]),
        late=np.array([2]),
        late_seconds=np.array([9.0]),
    )
    seconds = selector.observe(selector.init(federation), ended).arrays["seconds"]
    assert seconds[[0, 2]].tolist() == [4.0, 9.0]
    assert np.isnan(seconds[1])


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -0.1, 1.1])
def test_refl_selects_clients_without_a_valid_answer_last(nonsense: float) -> None:
    federation = population(4)
    told = telling([nonsense, 1.0, 0.9, nonsense])
    for seed in range(10):
        given_context = context(federation, 3, seed=seed)
        chosen = select(Refl(), Refl().init(federation), given_context, told)
        assert chosen.rows[:2].tolist() == [2, 1]
        assert "did not tell" in chosen.reasons[2]


@pytest.mark.parametrize("options", [{"rest": -1}, {"memory": 1.0}, {"memory": -0.1}])
def test_refl_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        create(Selector, "refl", options)
