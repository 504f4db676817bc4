import math
from collections import Counter
from collections.abc import Mapping, Sequence
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


class PlainRefl:
    """REFL in plain loops. last, begun: round of each client's last selection, and clock time of
    that round. clock: sum of the slowest trainings of all rounds. mean: μ."""

    def __init__(self, rest: int, memory: float) -> None:
        self.rest, self.memory = rest, memory
        self.last: dict[int, int] = {}
        self.begun: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.clock, self.mean = 0.0, math.nan

    def due(self, late: Sequence[int]) -> int:
        """Return the number of late updates that are expected within μ seconds."""
        found = 0
        for row in late:
            mean = 0.0 if math.isnan(self.mean) else self.mean
            known = row in self.seconds
            found += not known or self.begun[row] + self.seconds[row] - self.clock <= mean
        return found

    def rested(self, here: Sequence[int], number: int) -> list[int]:
        return [row for row in here if number - self.last.get(row, -math.inf) > self.rest]

    def learn(
        self,
        number: int,
        selected: Sequence[int],
        came: Mapping[int, float],
        late: Mapping[int, float],
    ) -> None:
        """Store a round. came, late: durations of the updates that came in time, and of the late
        ones that came in this round."""
        self.last |= dict.fromkeys(selected, number)
        self.begun |= dict.fromkeys(selected, self.clock)
        self.seconds |= {**came, **late}
        if came:
            slowest = max(came.values())
            self.clock += slowest
            before = slowest if math.isnan(self.mean) else self.mean
            self.mean = self.memory * before + (1 - self.memory) * slowest


def plain_least(values: Mapping[int, float], size: int, twin: np.random.Generator) -> list[int]:
    """Return the clients with the smallest values, in ascending order; ties are broken at
    random."""
    if not values or size < 1:
        return []
    last = sorted(values.values())[:size][-1]
    below = twin.permutation([row for row in values if values[row] < last]).tolist()
    below = sorted(map(int, below), key=lambda row: values[row])
    tied = [row for row in values if values[row] == last]
    most = min(size, len(values)) - len(below)
    return below + [int(row) for row in twin.choice(tied, most, replace=False)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rest", "memory"), [(0, 0.25), (1, 0.0), (3, 0.6), (5, 0.25)])
def test_rounds_agree_with_a_second_implementation(rest: int, memory: float, seed: int) -> None:
    """Many chances are equal, some answers are missing or invalid, some updates fail, and some come
    one to three rounds late. Clients 10 to 13 join in round 5."""
    generator, selector = np.random.default_rng(seed), Refl(rest=rest, memory=memory)
    plain, state = PlainRefl(rest, memory), selector.init(population(10))
    asks, late, kinds = list[Ask](), dict[int, tuple[int, float]](), Counter[str]()

    def respond(ask: Ask) -> Answers:
        asks.append(ask)
        rows = ask.rows[generator.random(len(ask.rows)) < 0.8]
        chances = generator.choice([-0.1, 0, 0.2, 0.2, 0.2 + 1e-14, 0.7, 1, 1.5], len(rows))
        return Answers(rows=rows, values={"availability": chances})

    for number in range(1, 17):
        clients, count = (14 if number >= 5 else 10), int(generator.integers(2, 7))
        here = np.flatnonzero(generator.random(clients) < 0.9)
        here = here[~np.isin(here, list(late))]
        given_context = replace(
            context(population(clients), count, number=number, seed=seed, available=here),
            late=np.array(sorted(late), dtype=np.int64),
        )
        selection, answers = played(selector, state, given_context, respond)
        chances = dict.fromkeys(plain.rested(here.tolist(), number), math.inf)
        ages = {row: plain.last[row] * 1.0 for row in here.tolist() if row not in chances}
        assert len(answers) == bool(chances)
        assert not chances or asks[-1].rows.tolist() == list(chances)
        for each in answers:
            span = asks[-1].parameters["begin"], asks[-1].parameters["end"]
            mean = 0.0 if math.isnan(plain.mean) else plain.mean
            assert span == pytest.approx((mean, 2 * mean))
            told = zip(each.rows.tolist(), each.values["availability"].tolist(), strict=True)
            chances |= {row: round(chance, 12) for row, chance in told if 0 <= chance <= 1}
        size = max(1, min(count, len(here)) - plain.due(list(late)))
        cohort = plain_least(chances, size, given_context.generator("refl"))
        longest = given_context.generator("refl/resting")
        cohort += plain_least(ages, size - len(cohort), longest)
        assert selection.rows.tolist() == cohort
        kinds["smaller"] += size < min(count, len(here))
        kinds["not rested"] += cohort[-1] in ages

        came = dict[int, float]()
        arriving = {row: seconds for row, (when, seconds) in late.items() if when == number}
        late = {row: found for row, found in late.items() if row not in arriving}
        for row in cohort:
            fate, seconds = generator.random(), float(generator.choice([1, 2, 2, 5, 9]))
            if fate < 0.5:
                came[row] = seconds
            elif fate < 0.8:
                late[row] = number + int(generator.integers(1, 4)), 3 * seconds
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=np.array(list(came), dtype=np.int64),
            seconds=np.array([came.get(row, np.nan) for row in cohort]),
            answers=answers,
            late=np.array(list(arriving), dtype=np.int64),
            late_seconds=np.array(list(arriving.values())),
        )
        state = selector.observe(state, ended)
        plain.learn(number, cohort, came, arriving)
    assert kinds["smaller"] >= 2
    assert kinds["not rested"] >= 1 or rest < 3
