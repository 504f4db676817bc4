from math import comb

import numpy as np
import pytest

from potluck.common.settings.plugins import create
from potluck.server.selection import Population, Selection, SelectionContext, Selector
from potluck.server.selectors.uniform import Uniform
from potluck.server.state import State


def population(clients: int) -> Population:
    ids = [f"k{row}" for row in range(clients)]
    return Population(ids=ids, classes=2, samples=np.zeros(clients, dtype=np.int64))


def select(
    clients: int, count: int, *, number: int = 1, seed: int = 0, available: list[int] | None = None
) -> Selection:
    rows = np.arange(clients) if available is None else np.array(available)
    context = SelectionContext(
        round=number,
        seed=seed,
        count=count,
        population=population(clients),
        available=rows.astype(np.int64),
    )
    return Uniform().select(State(), context)


def test_uniform_selector_is_installed() -> None:
    assert isinstance(create(Selector, "uniform", {}), Uniform)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_uniform_selects_count_clients_or_all_available_ones(count: int, size: int) -> None:
    chosen = select(24, count, available=[2, 3, 11, 20])
    assert len(set(chosen.rows.tolist())) == size
    assert set(chosen.rows.tolist()) <= {2, 3, 11, 20}
    assert len(chosen.reasons) == size


def test_uniform_selects_an_empty_cohort_if_no_client_is_available() -> None:
    assert select(24, 9, available=[]).rows.tolist() == []


def test_uniform_selects_the_same_cohort_for_the_same_seed_and_round() -> None:
    first = select(1000, 9, number=3, seed=7).rows
    assert first.tolist() == select(1000, 9, number=3, seed=7).rows.tolist()
    assert first.tolist() != select(1000, 9, number=4, seed=7).rows.tolist()
    assert first.tolist() != select(1000, 9, number=3, seed=8).rows.tolist()


def test_uniform_misses_a_rare_client_type_as_often_as_computed() -> None:
    """If 4 of 24 clients have a type, a cohort of 9 has none of them with probability 0.1285."""
    expected = comb(20, 9) / comb(24, 9)
    assert round(expected, 4) == 0.1285
    rounds = 4000
    without = sum(bool((select(24, 9, number=t).rows >= 4).all()) for t in range(1, rounds + 1))
    deviation = (expected * (1 - expected) / rounds) ** 0.5
    assert abs(without / rounds - expected) < 4 * deviation
