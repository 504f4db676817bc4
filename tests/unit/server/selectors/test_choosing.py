from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.populations import context, labelled, select

from potluck.server.selection import Answers, Selector
from potluck.server.selectors.dc import DcBalanced, DcReal
from potluck.server.selectors.fedentopt import FedEntOpt
from potluck.server.selectors.kl import KullbackLeibler
from potluck.server.selectors.parts.choosing import draw_weighted
from potluck.server.selectors.parts.reported import column, plausible

weights = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e300)), max_size=20)


@given(weights=weights, data=st.data())
def test_weighted_draw_takes_no_client_twice_and_weight_zero_last(
    weights: list[float], data: st.DataObject
) -> None:
    table = np.array(weights)
    size = data.draw(st.integers(0, len(table)))
    drawn = draw_weighted(table, size, np.random.default_rng(0)).tolist()
    assert len(drawn) == len(set(drawn)) == size
    positive = int((table > 1e-300).sum())
    assert (table[drawn] > 0).sum() >= min(size, positive)


def test_weighted_draw_takes_clients_one_after_another_by_weight() -> None:
    """P(first a, then b) = w_a / Σ · w_b / (Σ − w_a), within four deviations."""
    table = np.array([1.0, 2.0, 5.0])
    generator = np.random.default_rng(0)
    draws = 20_000
    seen = Counter(tuple(draw_weighted(table, 2, generator).tolist()) for _ in range(draws))
    for first in range(3):
        for second in {0, 1, 2} - {first}:
            share = table[first] / 8 * table[second] / (8 - table[first])
            spread = 4 * (draws * share * (1 - share)) ** 0.5
            assert seen[first, second] == pytest.approx(draws * share, abs=spread)


def test_answers_become_a_column_with_nan_for_missing_clients() -> None:
    answers = Answers(rows=np.array([3, 1]), values={"loss": np.array([0.3, 0.1])})
    assert np.array_equal(column(answers, "loss", 4), [np.nan, 0.1, np.nan, 0.3], equal_nan=True)
    assert np.isnan(column(answers, "other", 4)).all()


def test_implausible_values_become_nan_or_are_capped() -> None:
    values = np.array([1.0, 2.0, 3.0, 0.0, -1.0, np.nan, np.inf, 50.0])
    expected = [1.0, 2.0, 3.0, 0.0, np.nan, np.nan, np.nan, 25.0]
    assert np.array_equal(plausible(values, factor=10), expected, equal_nan=True)
    assert plausible(np.array([1e300]), factor=10).tolist() == [1e9]
    assert plausible(np.zeros(3), factor=10).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "selector", [FedEntOpt(buffer=3), DcBalanced(added=3), DcReal(added=3), KullbackLeibler()]
)
def test_clients_whose_label_counts_are_all_zero_come_last(selector: Selector) -> None:
    """Added to an even cohort, they change nothing, and any other client makes it less even."""
    counts = [[10, 0, 0], [0, 10, 0], [0, 0, 10], *[[9, 2, 3]] * 7, [0, 0, 0], [-1, -2, 0]]
    federation = labelled(counts)
    for seed in range(20):
        chosen = select(selector, selector.init(federation), context(federation, 6, seed=seed))
        drawn = [row for row, why in zip(chosen.rows, chosen.reasons, strict=True) if row >= 10]
        reasons = [why for row, why in zip(chosen.rows, chosen.reasons, strict=True) if row >= 10]
        assert all("drawn uniformly" in why for why in reasons), (drawn, reasons)
