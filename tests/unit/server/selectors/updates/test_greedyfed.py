"""GreedyFed: Shapley values against their definition, and the clients it selects by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.populations import context, facts, judged, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.server.plan.plan import draw_up
from potluck.server.selection import Judgement, MeasureMean
from potluck.server.selectors.updates.greedyfed import Coalition, GreedyFed, shapley_values
from potluck.server.state import State

Worth = Callable[[Coalition], float]


class EachOrder:
    """A generator whose permutations are all orders of the given players, one after the other."""

    def __init__(self) -> None:
        self.orders: dict[Coalition, Iterator[Coalition]] = {}

    def permutation(self, players: list[int]) -> np.ndarray:
        key = tuple(players)
        left = self.orders.setdefault(key, itertools.permutations(key))
        return np.array(next(left))


def reckoned(
    players: int,
    worth: Worth,
    *,
    tolerance: float = 0.0,
    permutations: int = 400,
    seed: int = 0,
    generator: Any = None,
) -> tuple[np.ndarray, list[Coalition]]:
    """Return the Shapley values, and the coalitions that were measured for them."""
    asked: list[Coalition] = []
    reckoning = shapley_values(
        players,
        generator or np.random.default_rng(seed),
        tolerance=tolerance,
        permutations=permutations,
    )
    coalition = next(reckoning)
    while True:
        asked.append(coalition)
        try:
            coalition = reckoning.send(worth(coalition))
        except StopIteration as ended:
            return ended.value, asked


def definition(players: int, worth: Worth) -> np.ndarray:
    """Return Shapley values by definition: each player's mean gain over all orders."""
    values = np.zeros(players)
    for order in itertools.permutations(range(players)):
        for place, player in enumerate(order):
            before = tuple(sorted(order[:place]))
            values[player] += worth(tuple(sorted((*before, player)))) - worth(before)
    return values / math.factorial(players)


def concave(coalition: Coalition) -> float:
    """Return a worth that each further player raises less; player 3 lowers it."""
    return math.sqrt(sum((1, 4, 9, 0, 2)[each] for each in coalition)) - 0.4 * (3 in coalition)


def plain_values(
    players: int, worth: Worth, tolerance: float, permutations: int, twin: np.random.Generator
) -> tuple[list[float], list[Coalition]]:
    """Return the values by GTG-Shapley, and the coalitions whose worth was needed, in order."""
    full = tuple(range(players))
    gains, means, needed = [0.0] * players, list[list[float]](), [(), full]
    while abs(worth(full) - worth(())) > tolerance:
        for leader in range(players):  # each player is first in turn
            others = twin.permutation([each for each in full if each != leader]).tolist()
            before: Coalition = ()
            for player in [leader, *others]:
                if abs(worth(full) - worth(before)) <= tolerance:
                    break
                after = tuple(sorted((*before, player)))
                gains[player] += worth(after) - worth(before)
                needed.append(after)
                before = after
            means.append([gain / (len(means) + 1) for gain in gains])
        distances = [
            [abs(a - b) / (abs(b) + 1e-12) for a, b in zip(mean, means[-1], strict=True)]
            for mean in means[-10:]
        ]
        near = all(sum(each) / players <= 0.05 for each in distances)
        if len(means) >= permutations or (len(means) >= 30 and near):
            return means[-1], list(dict.fromkeys(needed))
    return [0.0] * players, needed


def test_shapley_values_over_all_orders_equal_their_definition() -> None:
    """The 24 orders of four players are fewer than the 30 from which a result counts as final."""
    for players in (1, 2, 3, 4):
        orders = math.factorial(players)
        values, asked = reckoned(players, concave, permutations=orders, generator=EachOrder())
        assert values == pytest.approx(definition(players, concave), rel=1e-12)
        assert sorted(asked) == sorted(
            each
            for size in range(players + 1)
            for each in itertools.combinations(range(players), size)
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tolerance", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize(("players", "permutations"), [(1, 5), (3, 7), (5, 1000), (7, 40)])
def test_shapley_values_agree_with_a_second_implementation(
    players: int, permutations: int, tolerance: float, seed: int
) -> None:
    """Worths are whole numbers, many of them equal, or rise less with each further player."""
    noise = np.random.default_rng(seed).integers(-3, 6, 2**players).tolist()

    def uneven(coalition: Coalition) -> float:
        return float(noise[sum(2**player for player in coalition)])

    def rising(coalition: Coalition) -> float:
        return math.sqrt(sum((1, 4, 9, 0, 2, 5, 5)[each] for each in coalition)) + seed

    for worth in (uneven, rising):
        twin = np.random.default_rng(seed)
        values, asked = reckoned(
            players, worth, tolerance=tolerance, permutations=permutations, seed=seed
        )
        expected, needed = plain_values(players, worth, tolerance, permutations, twin)
        assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert asked == needed
        assert len(asked) == len(set(asked)) <= 2**players


def test_shapley_values_of_a_round_sum_to_its_gain() -> None:
    values, _ = reckoned(5, concave, permutations=1000)
    assert values.sum() == pytest.approx(concave((0, 1, 2, 3, 4)))


def test_shapley_values_of_additive_contributions_are_exact() -> None:
    worths = np.array([0.5, -1.0, 3.0, 0.0])
    values, _ = reckoned(4, lambda coalition: float(worths[list(coalition)].sum()))
    assert values == pytest.approx(worths)


def test_shapley_values_are_zero_if_the_round_hardly_changes_the_loss() -> None:
    values, asked = reckoned(6, lambda coalition: 1e-5 * len(coalition), tolerance=1e-4)
    assert values.tolist() == [0] * 6
    assert asked == [(), (0, 1, 2, 3, 4, 5)]


def test_clients_after_the_full_gain_in_a_permutation_are_not_measured() -> None:
    values, asked = reckoned(4, lambda coalition: float(bool(coalition)), tolerance=1e-4)
    assert values == pytest.approx([0.25] * 4)
    assert max(len(coalition) for coalition in asked if len(coalition) < 4) == 1


def test_number_of_measured_coalitions_is_bounded() -> None:
    generator = np.random.default_rng(3)
    noise: dict[Coalition, float] = {}
    _, asked = reckoned(9, lambda c: noise.setdefault(c, float(generator.normal())), permutations=9)
    assert len(asked) <= 2 + 9 * 8


def play(selector: GreedyFed, worths: np.ndarray, rounds: int, count: int) -> list[list[int]]:
    """Play rounds in which each update lowers the loss by its worth; return the cohorts."""

    def loss(wanted: MeasureMean) -> float:
        assert wanted.weights is None, "the mean is weighted as the round's model is"
        return 10.0 - float(worths[wanted.rows].sum())

    federation, cohorts = population(len(worths)), []
    state = selector.init(federation)
    for number in range(1, rounds + 1):
        chosen = select(selector, state, context(federation, count, number=number))
        judgement = judged(selector, state, facts(chosen.rows, number), loss)
        assert not judgement.set_aside
        state = selector.observe(state, outcome(number, chosen, judgement=judgement))
        cohorts.append(chosen.rows.tolist())
    return cohorts


def test_greedyfed_selects_the_most_valuable_clients_after_every_client_once() -> None:
    worths = np.array([0.1, 0.9, 0.3, -0.5, 0.8, 0.0])
    cohorts = play(GreedyFed(), worths, 8, 2)
    assert sorted(itertools.chain(*cohorts[:3])) == list(range(6))
    assert all(sorted(cohort) == [1, 4] for cohort in cohorts[3:])


@pytest.mark.parametrize(
    ("cumulative", "order"),
    [
        ("mean", [2, 0, 1]),  # client 0: 1.2
        ("sum", [0, 2, 1]),  # client 0: 2.4
        ("exponential", [2, 1, 0]),  # client 0: 0.75 · 1 + 0.25 · 1.4 = 1.1
    ],
)
def test_shapley_values_of_several_rounds_are_combined_into_one(
    cumulative: Any, order: list[int]
) -> None:
    selector = GreedyFed(cumulative=cumulative)
    state = selector.init(population(3))
    for rows, values in (([0, 1], [1.0, 1.15]), ([0, 2], [1.4, 1.3])):
        given = facts(np.array(rows))
        judgement = Judgement(values={"shapley": np.array(values)})
        ended = outcome(1, select(selector, state, context(population(3), 2)), judgement=judgement)
        state = selector.observe(state, replace(ended, facts=given, selected=given.rows))
    chosen = select(selector, state, context(population(3), 3, number=3))
    assert chosen.rows.tolist() == order


def test_update_with_an_infinite_loss_gets_a_very_low_shapley_value() -> None:
    given = facts(np.array([0, 1]))
    judgement = judged(
        GreedyFed(), State(), given, lambda wanted: math.inf if 1 in wanted.rows else 0.5
    )
    assert judgement.values["shapley"][1] < -1e8 < judgement.values["shapley"][0]


def test_greedyfed_with_secure_aggregation_is_refused() -> None:
    text = 'secure_aggregation = true\n[task]\nname = "digits"\nclients = 10\n'
    with pytest.raises(ConfigurationError, match="greedyfed needs the loss of means"):
        draw_up(f'{text}[selector]\nname = "greedyfed"\n', source="run file")
