"""Spread of metrics over clients, and the minimum number of clients to report it."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.common.learning.spread import QUANTILES, spread, spreads
from potluck.common.trainer import Measure

HIGHER = Measure(label="accuracy", higher_is_better=True)
LOWER = Measure(label="loss")


@pytest.mark.parametrize(
    ("clients", "worst"), [(5, 2), (10, 2), (11, 2), (20, 2), (21, 3), (100, 10), (101, 11)]
)
def test_worst_tenth_always_contains_more_than_one_client(clients: int, worst: int) -> None:
    values = np.random.default_rng(clients).permutation(clients).astype(float)
    best = spread(values.tolist(), higher_is_better=True)
    assert best.clients == clients
    assert best.mean == pytest.approx((clients - 1) / 2)
    assert list(best.quantiles) == list(QUANTILES)
    assert list(best.quantiles.values()) == pytest.approx(np.quantile(values, QUANTILES))
    assert best.worst_tenth == pytest.approx((worst - 1) / 2)
    lowest = spread(values.tolist(), higher_is_better=False)
    assert lowest.worst_tenth == pytest.approx(clients - 1 - (worst - 1) / 2)


def test_quantiles_never_equal_the_minimum_or_maximum() -> None:
    for clients in range(3, 40):
        values = [float(number) for number in range(clients)]
        found = spread(values, higher_is_better=True)
        assert values[0] < min(found.quantiles.values())
        assert max(found.quantiles.values()) < values[-1]
        assert len(found.statistics) == len(QUANTILES) + 2


def test_spread_of_a_metric_over_too_few_clients_is_not_reported() -> None:
    found = [{"loss": 1.0, "accuracy": 0.5}] * 4 + [{"loss": 2.0}, {}]
    measures = {"loss": LOWER, "accuracy": HIGHER, "f1": HIGHER}
    assert spreads(found, measures, least_group=5).keys() == {"loss"}
    assert spreads(found, measures, least_group=4).keys() == {"loss", "accuracy"}
    assert spreads(found[:2], measures, least_group=1) == {}
