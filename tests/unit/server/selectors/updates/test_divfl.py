"""DivFL, compared with a worked example and with a plain greedy search in numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.populations import context, facts_of, outcome, population, select

from potluck.common.errors import ConfigurationError
from potluck.server.selection import Selection
from potluck.server.selectors.updates.divfl import DivFL, distances, greedy
from potluck.server.state import State

LINE = np.array([[0.0], [1.0], [5.0], [6.0], [20.0]])


def test_divfl_selects_the_client_that_reduces_the_sum_of_distances_most() -> None:
    chosen, reached = greedy(distances(LINE), np.arange(5), 3, np.random.default_rng(1))
    assert chosen[:2].tolist() == [2, 4]
    assert chosen[2] in (0, 1), "they are equal"
    assert reached == pytest.approx([25, 10, 2])


def plain(apart: np.ndarray, able: list[int], count: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(count):
        left = [each for each in able if each not in chosen]
        totals = [apart[:, [*chosen, each]].min(axis=1).sum() for each in left]
        chosen.append(left[int(np.argmin(totals))])
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_lazy_greedy_search_selects_the_same_clients_as_the_plain_one(seed: int) -> None:
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(40, 6)) * generator.uniform(0.1, 3, (40, 1))
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
    assert distances(vectors) == pytest.approx(apart, abs=1e-6)
    able = sorted(generator.choice(40, 25, replace=False).tolist())
    chosen, reached = greedy(apart, np.array(able), 12, generator)
    assert chosen.tolist() == plain(apart, able, 12)
    assert reached[-1] == pytest.approx(apart[:, chosen].min(axis=1).sum())


def learned(selector: DivFL, vectors: np.ndarray) -> State:
    rows = np.arange(len(vectors))
    everybody = Selection(rows=rows, reasons=["x"] * len(rows))
    ended = dataclasses.replace(outcome(1, everybody), facts=facts_of(vectors, rows=rows))
    return selector.observe(selector.init(population(len(rows))), ended)


def test_divfl_selects_every_client_once_before_any_twice() -> None:
    selector, federation = DivFL(), population(10)
    state, picked = selector.init(federation), []
    for number in range(1, 4):
        chosen = select(selector, state, context(federation, 4, number=number))
        picked += chosen.rows.tolist()
        state = selector.observe(state, outcome(number, chosen))
    assert sorted(picked[:10]) == list(range(10))


def test_divfl_weights_are_the_number_of_clients_represented() -> None:
    selector = DivFL(weighted=True)
    state = learned(selector, np.array([[0.0], [0.1], [0.2], [9.0], [9.1]]))
    chosen = select(selector, state, context(population(5), 2, number=2))
    assert chosen.weights is not None
    by_row = dict(zip(chosen.rows.tolist(), chosen.weights.tolist(), strict=True))
    assert sorted(by_row.values()) == [2, 3]
    assert selector.sets_weights
    assert not DivFL().sets_weights


def test_divfl_refuses_more_than_3000_clients() -> None:
    federation = population(3001)
    with pytest.raises(ConfigurationError, match=r"divfl compares all clients .* up to 3,000"):
        select(DivFL(), DivFL().init(federation), context(federation, 3))
