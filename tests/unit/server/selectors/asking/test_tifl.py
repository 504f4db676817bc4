"""TiFL's tiers, credits and probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.plain_loops import limited, position_at
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


def test_a_failure_counts_as_long_as_the_deadline() -> None:
    """Also after a success; otherwise a client that stopped working would stay in its fast tier."""
    federation, selector = population(3), TiFL(tiers=3)
    fine = RoundOutcome(
        round=1, selected=np.arange(3), included=np.arange(3), seconds=np.array([1.0, 9, 5])
    )
    failed = replace(fine, included=np.array([1, 2]), deadline_seconds=100.0)
    state = selector.observe(selector.observe(selector.init(federation), fine), failed)
    assert [rows.tolist() for rows in selector._groups(state)] == [[2], [1], [0]]
    assert state.arrays["seconds"].tolist() == [101, 18, 10]


def test_a_client_that_over_selection_made_unnecessary_counts_as_slow_as_the_slowest() -> None:
    federation, selector = population(3), TiFL(tiers=3)
    outcome = RoundOutcome(
        round=1,
        selected=np.array([1, 2]),
        included=np.array([1, 2]),
        seconds=np.array([9.0, 5.0]),
        cohort=np.arange(3),
    )
    state = selector.observe(selector.init(federation), outcome)
    assert state.arrays["seconds"].tolist() == [9, 9, 5]
    assert state.arrays["tried"].tolist() == [1, 1, 1]


class PlainTiFL:
    """TiFL in plain loops. most: number of rounds that may use a tier. ranking: tiers by falling
    loss when probabilities last changed; None before."""

    def __init__(self, tiers: int, most: float) -> None:
        self.tiers, self.most = tiers, most
        self.times: dict[int, list[float]] = {}
        self.used = [0] * tiers
        self.losses = [math.nan] * tiers
        self.ranking: list[int] | None = None
        self.last: int | None = None

    def groups(self) -> list[list[int]]:
        means = {row: sum(times) / len(times) for row, times in self.times.items() if times}
        means = {row: max(mean, 1e-6) for row, mean in limited(means, 10).items()}
        left = sorted(self.times, key=lambda row: (means.get(row, math.inf), row))
        size, larger = divmod(len(left), self.tiers)
        found = []
        for tier in range(self.tiers):
            edge = size + (tier < larger)
            found.append(left[:edge])
            left = left[edge:]
        return found

    def judge(self, answers: Mapping[int, float]) -> None:
        known, before = limited(answers, 100), self.losses
        self.losses = [math.nan] * self.tiers
        for tier, group in enumerate(self.groups()):
            values = [known[row] for row in group if row in known]
            if values:
                self.losses[tier] = sum(values) / len(values)
        if self.last is not None and self.losses[self.last] >= before[self.last]:
            order = [-math.inf if math.isnan(loss) else loss for loss in self.losses]
            self.ranking = sorted(range(self.tiers), key=lambda tier: (-order[tier], tier))

    def probabilities(self, tiers: Sequence[int]) -> list[float]:
        """Return the probability of each tier if only these are ranked; 0 for the others."""
        found, count = [0.0] * self.tiers, len(tiers)
        for tier in tiers:
            found[tier] = 1 / self.tiers
        for place, tier in enumerate(tier for tier in self.ranking or [] if tier in tiers):
            found[tier] = (count - place) / (count * (count + 1) / 2)
        return found

    def tier(self, here: Sequence[Sequence[int]], share: float) -> int:
        """Return the tier that this share in [0, 1) draws. here: available clients per tier."""
        credit = [tier for tier in range(self.tiers) if self.used[tier] < self.most]
        if not any(here[tier] for tier in credit):
            credit = list(range(self.tiers))
        chances = self.probabilities(credit)
        return position_at([c if rows else 0 for c, rows in zip(chances, here, strict=True)], share)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("option", "rounds", "most"), [(0, 0, math.inf), (0, 24, 6), (4, 24, 4)])
def test_rounds_agree_with_a_second_implementation(
    option: int, rounds: int, most: float, seed: int
) -> None:
    """option: `credits`. most: the number of rounds of a tier that follows. One of the seeds has no
    deadline."""
    deadline = 600.0 if seed else math.inf
    generator, federation = np.random.default_rng(seed), population(11)
    selector, plain = TiFL(tiers=4, interval=2, asked=3, credits=option), PlainTiFL(4, most)
    state, questions = selector.init(federation), list[list[int]]()

    def answer(ask: Ask) -> Answers:
        questions.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.8]
        values = generator.integers(0, 5, len(rows)).astype(np.float64)
        values[generator.random(len(rows)) < 0.05] = 1e6
        return Answers(rows=rows, values={"loss": values})

    for number in range(1, 25):
        here = np.flatnonzero(generator.random(11) < 0.7)
        given = context(federation, 4, number=number, seed=seed, available=here)
        selection, answers = played(selector, state, replace(given, rounds=rounds), answer)
        picked, twin = selection.rows.tolist(), given.generator("tifl")
        new, chosen = [row for row in here.tolist() if row not in plain.times], None
        groups = [[row for row in group if row in here] for group in plain.groups()]
        if new:
            assert set(picked[: len(new)]) <= set(new)
        else:
            for each in answers:
                asked = [twin.permutation(np.sort(group))[:3] for group in groups]
                assert questions[-1] == np.sort(np.concatenate(asked)).tolist()
                values = each.values["loss"].tolist()
                plain.judge(dict(zip(each.rows.tolist(), values, strict=True)))
            assert len(answers) == (number % 2 == 0)
            for other in range(20 if number % 2 else 0):  # more draws from the same state
                again = replace(given, seed=100 + other, rounds=rounds)
                tier = plain.tier(groups, again.generator("tifl").random())
                reason = played(selector, state, again)[0].reasons[0]
                assert reason == f"drawn from tier {tier + 1} of 4"
            chosen = drawn = plain.tier(groups, twin.random())
            nearest = sorted(range(4), key=lambda tier: abs(tier - drawn))
            expected = [tier for tier in nearest for _ in groups[tier]][:4]
            assert [t for row in picked for t in range(4) if row in groups[t]] == expected
            assert selection.reasons[0] == f"drawn from tier {chosen + 1} of 4"

        arrived = generator.random(len(picked)) < 0.8
        seconds = np.where(arrived, generator.choice([0, 1, 2, 2, 3, 500], len(picked)), np.nan)
        ended = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows[arrived],
            seconds=seconds,
            answers=answers,
            deadline_seconds=deadline,
        )
        state = selector.observe(state, ended)
        for row, came, time_taken in zip(picked, arrived, seconds.tolist(), strict=True):
            plain.times.setdefault(row, []).extend(
                [time_taken] if came else [deadline] * bool(seed)
            )
        if chosen is not None:
            plain.used[chosen] += 1
            plain.last = chosen
        assert state.arrays["used"].tolist() == plain.used
        assert state.arrays["losses"] == pytest.approx(plain.losses, nan_ok=True)
        assert state.arrays["probabilities"] == pytest.approx(plain.probabilities(range(4)))
    assert sum(plain.used) >= 15
    assert plain.ranking is not None


def test_a_hundred_thousand_clients_take_seconds() -> None:
    clients = 100_000
    started = time.process_time()
    selection, _ = played(TiFL(), known(TiFL(), clients), context(population(clients), 1000))
    assert len(selection.rows) == 1000
    assert time.process_time() - started < 20
