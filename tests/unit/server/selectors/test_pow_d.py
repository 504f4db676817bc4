import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from support.plain_loops import limited
from support.populations import Respond, context, played, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Population, Selector
from potluck.server.selectors.pow_d import PowerOfChoice
from potluck.server.state import State


def answering(losses: ArrayLike) -> Respond:
    """Return answers in which client k has `losses[k]`; None becomes NaN."""
    told = np.array(losses, dtype=np.float64)

    def respond(ask: Ask) -> Answers:
        return Answers(rows=ask.rows, values={"loss": told[ask.rows]})

    return respond


def with_samples(samples: ArrayLike) -> Population:
    numbers = np.array(samples, dtype=np.int64)
    given = population(len(numbers))
    return type(given)(ids=given.ids, classes=2, samples=numbers)


def asked(
    selector: PowerOfChoice, federation: Population, count: int, *, seed: int = 0
) -> list[int]:
    choosing = selector.select(State(), context(federation, count, seed=seed))
    ask = next(choosing)
    assert ask.kind == "loss"
    rows: list[int] = ask.rows.tolist()
    return rows


def test_pow_d_selects_the_largest_losses_as_in_the_worked_example() -> None:
    """A worked example: the largest losses, then, with `order = asc`, the smallest."""
    given = context(population(4), 2)
    losses = answering([0.3, 0.9, 0.5, 0.7])
    assert select(PowerOfChoice(), State(), given, losses).rows.tolist() == [1, 3]
    ascending = PowerOfChoice(order="asc")
    assert select(ascending, State(), given, losses).rows.tolist() == [0, 2]


def test_pow_d_asks_and_selects_only_candidates() -> None:
    federation = population(40)
    for seed in range(20):
        rows = asked(PowerOfChoice(), federation, 5, seed=seed)
        assert len(set(rows)) == 10
        losses = answering(np.arange(40))
        chosen = select(PowerOfChoice(), State(), context(federation, 5, seed=seed), losses)
        assert chosen.rows.tolist() == sorted(rows, reverse=True)[:5]


@pytest.mark.parametrize(("candidates", "expected"), [(0, 10), (7, 7), (3, 5), (100, 40)])
def test_number_of_candidates_lies_between_cohort_size_and_available_clients(
    candidates: int, expected: int
) -> None:
    """Twice the cohort by default; never fewer than the cohort, never more than there are."""
    selector = PowerOfChoice(candidates=candidates)
    assert len(asked(selector, population(40), 5)) == expected


def test_candidates_are_drawn_in_proportion_to_their_samples() -> None:
    """P ∝ n, without replacement: 4000 draws of one candidate, within four deviations."""
    federation = with_samples([100, 200, 300, 400])
    drawn = Counter(
        asked(PowerOfChoice(candidates=1), federation, 1, seed=seed)[0] for seed in range(4000)
    )
    for row, share in enumerate([0.1, 0.2, 0.3, 0.4]):
        assert drawn[row] == pytest.approx(
            4000 * share, abs=4 * (4000 * share * (1 - share)) ** 0.5
        )
    uniform = PowerOfChoice(candidates=1, draw="uniform")
    drawn = Counter(asked(uniform, federation, 1, seed=seed)[0] for seed in range(4000))
    assert min(drawn.values()) > 850


def test_unknown_sample_count_is_treated_as_the_mean() -> None:
    federation = with_samples([0, 10, 30, 0])
    drawn = Counter(
        asked(PowerOfChoice(candidates=1), federation, 1, seed=seed)[0] for seed in range(4000)
    )
    assert drawn[0] == pytest.approx(1000, abs=120)
    assert drawn[1] == pytest.approx(500, abs=100)


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf, -1.0])
def test_candidate_without_a_valid_loss_is_selected_last(nonsense: float) -> None:
    losses = answering([nonsense, 0.1, 0.2])
    selection = select(PowerOfChoice(), State(), context(population(3), 2), losses)
    assert selection.rows.tolist() == [2, 1]
    only = select(PowerOfChoice(), State(), context(population(3), 3), losses)
    assert only.rows.tolist() == [2, 1, 0]
    assert "sent no loss" in only.reasons[2]


def test_candidates_without_an_answer_are_replaced_by_other_clients() -> None:
    federation = population(10)

    def no_answers(ask: Ask) -> Answers:
        return Answers(rows=ask.rows[:0], values={})

    selector = PowerOfChoice(candidates=4)
    selection, _ = played(selector, State(), context(federation, 3), no_answers)
    assert set(selection.rows.tolist()).isdisjoint(asked(selector, federation, 3))
    assert len(selection.rows) == 3


def test_pow_d_draws_among_equal_losses_at_random() -> None:
    first = {
        int(select(PowerOfChoice(), State(), context(population(6), 1, seed=seed)).rows[0])
        for seed in range(3)
    }
    equal = answering(np.ones(6))
    chosen = {
        int(
            select(
                PowerOfChoice(candidates=6), State(), context(population(6), 1, seed=seed), equal
            ).rows[0]
        )
        for seed in range(100)
    }
    assert chosen == set(range(6))
    assert first <= chosen


@pytest.mark.parametrize(
    "options", [{"candidates": -1}, {"draw": "size"}, {"order": "up"}, {"candidates": 1.5}]
)
def test_pow_d_option_out_of_range_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "pow-d", options)


def plain_candidates(
    sizes: Mapping[int, float], number: int, twin: np.random.Generator
) -> list[int]:
    """Draw candidates without replacement, with chances in proportion to their sizes: those whose
    exponential waiting times, with the sizes as rates, end first."""
    if number >= len(sizes):
        return sorted(sizes)
    first = twin.exponential(size=(2, len(sizes))).tolist()[0]
    waits = {row: first[place] / size for place, (row, size) in enumerate(sizes.items())}
    return sorted(sorted(waits, key=lambda row: waits[row])[:number])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"order": "asc", "candidates": 6},
        {"draw": "uniform", "candidates": 5},
        {"candidates": 2},
        {"candidates": 100},
    ],
)
def test_rounds_agree_with_a_second_implementation(options: dict[str, Any], seed: int) -> None:
    """Losses change from round to round. Some clients are unavailable, some answers are missing,
    invalid, equal or far above the others, and numbers of samples become known in the run."""
    generator, selector = np.random.default_rng(seed), create(Selector, "pow-d", options)
    state, sign = selector.init(population(14)), 1 if options.get("order") == "asc" else -1
    samples, known = generator.integers(1, 200, 14).tolist(), dict[int, int]()
    questions, told = list[list[int]](), dict[int, float]()

    def answer(ask: Ask) -> Answers:
        questions.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.8]
        usual = [np.nan, -1, 0, 1, 1, 2.5, 3, generator.random(), generator.random(), 1e4]
        losses = generator.choice(usual, len(rows))
        told.update(zip(rows.tolist(), losses.tolist(), strict=True))
        return Answers(rows=rows, values={"loss": losses})

    for number in range(1, 31):
        here = np.flatnonzero(generator.random(14) < 0.8)
        federation = with_samples([known.get(row, 0) for row in range(14)])
        given = context(federation, 4, number=number, seed=seed, available=here)
        questions.clear()
        told.clear()
        selection = played(selector, state, given, answer)[0]

        twin, seen = given.generator("pow-d"), [known[row] for row in here.tolist() if row in known]
        usual = sum(seen) / len(seen) if seen else 1.0
        sizes = {row: known.get(row, usual) for row in here.tolist()}
        if options.get("draw") == "uniform":
            sizes = dict.fromkeys(sizes, 1.0)
        candidates = plain_candidates(sizes, max(options.get("candidates", 8), 4), twin)
        assert questions == [candidates]
        losses = limited({row: told.get(row, math.nan) for row in candidates}, 100)
        ties = dict(zip(candidates, twin.random(len(candidates)).tolist(), strict=True))
        ranked = sorted(losses, key=lambda row: (sign * round(losses[row], 12), ties[row]))
        expected, size = ranked[:4], min(4, len(here))
        for group in (set(here.tolist()) - set(candidates), set(here.tolist())):
            others = sorted(group - set(expected))
            count = min(size - len(expected), len(others))
            expected += twin.choice(np.array(others, np.int64), count, replace=False).tolist()
        assert selection.rows.tolist() == expected
        reported = [float(why.split()[1].strip(",")) for why in selection.reasons[: len(ranked)]]
        assert reported == pytest.approx([losses[row] for row in ranked[:4]], rel=1e-3)

        for row in selection.rows[generator.random(size) < 0.5].tolist():
            known[row] = samples[row]
    assert len(known) > 6
