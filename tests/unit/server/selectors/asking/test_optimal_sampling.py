import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from support.plain_loops import limited
from support.populations import Respond, context, population, select

from potluck.common.errors import ConfigurationError
from potluck.common.settings.plugins import create
from potluck.server.selection import Answers, Ask, Population, Selector
from potluck.server.selectors.asking.optimal_sampling import (
    OptimalSampling,
    approximate,
    optimal,
    systematic,
)
from potluck.server.state import State

NORMS = [1.0, 2.0, 3.0, 4.0, 10.0]


def federation(samples: list[int]) -> Population:
    return replace(population(len(samples)), samples=np.array(samples, dtype=np.int64))


def answering(norms: ArrayLike) -> Respond:
    told = np.array(norms, dtype=np.float64)

    def respond(ask: Ask) -> Answers:
        assert ask.kind == "gradient-norm"
        return Answers(rows=ask.rows, values={"gradient-norm": told[ask.rows]})

    return respond


def test_probabilities_by_hand() -> None:
    """The norms are 1, 2, 3, 4 and 10. Two of five: the client of norm 10 is always drawn, the
    others share one place by 1 : 2 : 3 : 4. Four of five: norms from 3 on are always drawn."""
    assert optimal(np.array(NORMS), 2).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 1])
    assert optimal(np.array(NORMS), 3).tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert optimal(np.array(NORMS), 4).tolist() == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def bisected(importance: list[float], size: int) -> list[float]:
    """Return min(1, u / τ), with τ found by bisection: another form of the same optimum."""
    low, high = 0.0, sum(importance)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(1.0, each / middle) for each in importance) > size:
            low = middle
        else:
            high = middle
    return [min(1.0, each / high) for each in importance]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=12), st.data())
def test_probabilities_are_those_of_the_optimum(norms: list[float], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(norms) - 1))
    found = optimal(np.array(norms), size)
    assert found.sum() == pytest.approx(size)
    assert found.tolist() == pytest.approx(bisected(norms, size), rel=1e-6)


def authors_chances(norms: list[float], size: int, steps: int) -> list[float]:
    """Return the chances by the authors' program, where a client knows only its norm and sums."""
    total = sum(norms)
    chances = [min(1.0, norm * size / total) for norm in norms]
    for _ in range(steps):
        message = [(chance, 1.0) if chance < 1 else (0.0, 0.0) for chance in chances]
        mass, below = (sum(column) for column in zip(*message, strict=True))
        if mass == 0:  # every client is certain to be drawn
            break
        factor = (size - len(norms) + below) / mass
        chances = [chance if chance == 1 else min(1.0, chance * factor) for chance in chances]
        if factor <= 1:
            break
    return chances


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=12), st.integers(1, 5), st.data())
def test_the_approximation_is_that_of_the_authors_program(
    norms: list[float], steps: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(norms) - 1))
    found = approximate(np.array(norms), size, steps)
    assert found.tolist() == pytest.approx(authors_chances(norms, size, steps))
    assert found.sum() <= size + 1e-9
    many = approximate(np.array(norms), size, 50)
    assert many.tolist() == pytest.approx(optimal(np.array(norms), size).tolist(), rel=1e-6)


def test_gradients_of_zero_share_what_the_others_leave() -> None:
    for rule in (optimal, lambda u, size: approximate(u, size, 4)):
        assert rule(np.zeros(4), 2).tolist() == [0.5] * 4
    assert optimal(np.array([0.0, 3.0, 0.0]), 2).tolist() == [0.5, 1.0, 0.5]


def test_draws_have_their_probabilities_and_a_fixed_size() -> None:
    """Frequencies of 3000 draws lie within four and a half standard deviations."""
    chances, times = np.array([0.1, 0.2, 0.3, 0.4, 1.0]), np.zeros(5)
    for seed in range(3000):
        drawn = systematic(chances, np.random.default_rng(seed))
        assert len(set(drawn.tolist())) == len(drawn) == 2
        times[drawn] += 1
    deviations = np.sqrt(3000 * chances * (1 - chances))
    assert (np.abs(times - 3000 * chances) <= 4.5 * deviations).all()


def test_the_weighted_sum_is_unbiased() -> None:
    """The mean over seeds of Σ n_k x_k / (n p_k) is the mean of x weighted by samples."""
    clients, values = federation([100, 100, 200, 50, 10]), np.array([1.0, -4.0, 2.0, 10.0, 7.0])
    told = answering([1.0, 5.0, 0.3, 2.0, 40.0])
    sums = []
    for seed in range(2500):
        chosen = select(OptimalSampling(), State(), context(clients, 2, seed=seed), told)
        assert chosen.weights is not None
        assert len(chosen.rows) == 2
        sums.append(float((chosen.weights * values[chosen.rows]).sum()) / 460)
    expected = float((clients.samples * values).sum()) / 460
    assert abs(np.mean(sums) - expected) < 4 * np.std(sums) / np.sqrt(len(sums))


def test_weights_are_samples_over_probabilities() -> None:
    clients = federation([10] * 5)
    chosen = select(OptimalSampling(), State(), context(clients, 2), answering(NORMS))
    assert chosen.rows[0] == 4
    assert chosen.reasons[0] == "gradient 10: probability 1"
    assert chosen.weights is not None
    expected = 10 / np.array([0.1, 0.2, 0.3, 0.4, 1])[chosen.rows]
    assert chosen.weights == pytest.approx(expected)
    plain = OptimalSampling(weights="samples")
    assert not plain.sets_weights
    again = select(plain, State(), context(clients, 2), answering(NORMS))
    assert again.weights is None
    assert again.rows.tolist() == chosen.rows.tolist()


def test_unknown_samples_are_the_same_mean_in_probability_and_weight() -> None:
    clients = federation([1000, 10, 0])
    sizes = np.array([1000, 10, 505.0])
    chances = optimal(sizes, 2)
    for seed in range(20):
        given = context(clients, 2, seed=seed)
        chosen = select(OptimalSampling(), State(), given, answering([1.0, 1.0, 1.0]))
        assert chosen.weights == pytest.approx((sizes / chances)[chosen.rows])


def test_candidates_are_drawn_uniformly() -> None:
    asked = []

    def note(ask: Ask) -> Answers:
        asked.append(ask.rows.tolist())
        return answering(np.ones(100))(ask)

    clients = federation([1] * 100)
    for candidates in (32, 3, 0):
        selector = OptimalSampling(candidates=candidates)
        select(selector, State(), context(clients, 5), note)
    assert [len(rows) for rows in asked] == [32, 5, 100]
    assert asked[0] == sorted(asked[0])


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -1.0])
def test_candidates_without_a_norm_come_last(nonsense: float) -> None:
    clients, told = federation([10] * 4), answering([nonsense, 0.0, 3, nonsense])
    for seed in range(10):
        chosen = select(OptimalSampling(), State(), context(clients, 3, seed=seed), told)
        assert chosen.rows[:2].tolist() == [2, 1]
        assert chosen.reasons[2] == "gave no gradient norm; drawn uniformly"
        assert chosen.weights is not None
        assert chosen.weights.tolist() == [10.0] * 3


def test_the_approximation_may_leave_places_free() -> None:
    """By hand: 4 u / Σu = .0117, .0469, .188, .751 and 3.0; 1 for the last leaves three places for
    .997, and three times .751 is 1 again. The optimum is .2, .8, 1, 1 and 1."""
    norms = np.array([1.0, 4, 16, 64, 256])
    once = approximate(norms, 4, 1)
    assert once.tolist() == pytest.approx([0.03529, 0.14118, 0.56471, 1, 1], abs=1e-5)
    assert optimal(norms, 4).tolist() == pytest.approx([0.2, 0.8, 1, 1, 1])
    clients = federation([10] * 5)
    selector = OptimalSampling(rule="approximate", steps=1)
    sizes = {
        len(select(selector, State(), context(clients, 4, seed=seed), answering(norms)).rows)
        for seed in range(30)
    }
    assert sizes == {2, 3}


@pytest.mark.parametrize("options", [{"candidates": -1}, {"rule": "best"}, {"steps": 0}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"'{next(iter(options))}'"):
        create(Selector, "ocs", options)


def plain_chances(importance: Mapping[int, float], size: int) -> dict[int, float]:
    """Return probabilities ∝ importance with sum `size`; clients above 1 are certain."""
    found, free, places = dict[int, float](), dict(importance), size
    while free:
        total = sum(free.values())
        shares = {
            row: places * (value / total if total else 1 / len(free)) for row, value in free.items()
        }
        certain = [row for row in free if shares[row] >= 1]
        if not certain:
            return found | shares
        found |= dict.fromkeys(certain, 1.0)
        free = {row: value for row, value in free.items() if row not in certain}
        places -= len(certain)
    return found


def plain_draw(chances: Mapping[int, float], twin: np.random.Generator) -> list[int]:
    """Draw the certain clients, and those at one random place of each unit of the line on which
    the others lie in random order, with segments as long as their chances."""
    drawn = [row for row in chances if chances[row] > 1 - 1e-12]
    rest = [row for row in chances if row not in drawn]
    order = twin.permutation(np.array(rest, dtype=np.int64)).tolist()
    place, end, found = float(twin.random()), 0.0, []
    for row in order:
        end += chances[row]
        if end > place:
            found.append(row)
            place += 1
    return drawn + sorted(found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"candidates": 6},
        {"candidates": 2, "weights": "samples"},
        {"rule": "approximate", "candidates": 7, "steps": 1},
        {"rule": "approximate"},
    ],
)
def test_rounds_agree_with_a_second_implementation(options: dict[str, Any], seed: int) -> None:
    """Norms change from round to round. Some clients are unavailable, some answers are missing,
    invalid, equal or far above the others, and numbers of samples become known in the run."""
    generator, selector = np.random.default_rng(seed), create(Selector, "ocs", options)
    sizes, known = generator.integers(1, 200, 12), np.zeros(12, dtype=np.int64)
    exact, questions, told = "rule" not in options, list[list[int]](), dict[int, float]()

    def answer(ask: Ask) -> Answers:
        questions.append(ask.rows.tolist())
        rows = ask.rows[generator.random(len(ask.rows)) < 0.85]
        usual = [np.nan, -1, 0, 1, 1, generator.random(), 2 + generator.random(), 3, 1e4]
        norms = generator.choice(usual, len(rows))
        told.update(zip(rows.tolist(), norms.tolist(), strict=True))
        return Answers(rows=rows, values={"gradient-norm": norms})

    for number in range(1, 31):
        here = np.flatnonzero(generator.random(12) < 0.8)
        given_context = context(
            federation(known.tolist()), 4, number=number, seed=seed, available=here
        )
        questions.clear()
        told.clear()
        chosen = select(selector, State(), given_context, answer)

        twin, rows = given_context.generator("ocs"), here.tolist()
        wanted = max(options.get("candidates", 32), 4)
        asked = rows if wanted >= len(rows) else sorted(twin.choice(here, wanted, replace=False))
        assert questions == [asked]
        norms = limited({row: told.get(row, math.nan) for row in asked}, 100)
        usual = known[known > 0].mean() if known.any() else 1.0
        n = {row: float(size) or usual for row, size in enumerate(known.tolist())}
        importance = {row: n[row] * norm for row, norm in norms.items()}
        count, size = min(4, len(rows)), min(4, len(norms))
        chances = plain_chances(importance, size)
        if not exact and any(importance.values()):
            values = authors_chances([*importance.values()], size, options.get("steps", 4))
            chances = dict(zip(importance, values, strict=True))
        drawn = plain_draw({row: chances[row] for row in norms}, twin)
        expected = sorted(drawn, key=lambda row: -norms[row])[:size]
        if len(norms) < count:
            rest = [row for row in rows if row not in expected]
            expected += twin.choice(np.array(rest), count - len(expected), replace=False).tolist()
        assert chosen.rows.tolist() == expected
        assert len(expected) == count or not exact
        if "weights" in options:
            assert chosen.weights is None
        else:
            weights = [n[row] / (chances.get(row) or 1.0) for row in expected]
            assert chosen.weights == pytest.approx(weights)
        arrived = chosen.rows[generator.random(len(chosen.rows)) < 0.5]
        known[arrived] = sizes[arrived]
    assert known.any()
