"""Coverage: the numbers of clients and samples from which a metric is computed."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.common.learning.measures import MeasureSums
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.spread import Coverage, coverages
from potluck.common.trainer import Measured


def test_clients_without_samples_for_a_metric_are_not_counted_as_missing() -> None:
    counted = [{"near": 4, "far": 0}, {"near": 6}, {"near": 0, "far": 0}]
    found = coverages(counted, ["near", "far"], least_share=1.0)
    assert found == {"near": Coverage(clients=2, asked=2, samples=10)}


@pytest.mark.parametrize(
    ("least_share", "partial"), [(1.0, True), (0.76, True), (0.75, False), (0.1, False)]
)
def test_metric_over_too_few_of_the_asked_clients_is_partial(
    least_share: float, partial: bool
) -> None:
    found = coverages([{"near": 1}] * 3, ["near"], missing=1, least_share=least_share)
    assert found == {"near": Coverage(clients=3, asked=4, samples=3, partial=partial)}
    assert found["near"].incomplete


def test_metric_without_any_client_is_partial_if_clients_are_missing() -> None:
    found = coverages([], ["near"], missing=2, least_share=0.01)
    assert found == {"near": Coverage(clients=0, asked=2, samples=0, partial=True)}
    assert coverages([], ["near"], missing=0) == {}


def test_minimum_coverage_share_is_reached_despite_rounding_errors() -> None:
    found = coverages([{"near": 1}] * 7, ["near"], missing=3, least_share=0.7)
    assert not found["near"].partial


def test_evaluation_counts_and_sums_give_the_samples_of_each_metric() -> None:
    counts = EvaluationCounts(
        loss_sum=1.0,
        confusion=np.array([[3, 1], [0, 2]]),
        group_samples=np.array([2, 2]),
        group_correct=np.array([2, 1]),
    )
    assert counts.counted == {
        "loss": 6,
        "accuracy": 6,
        "worst_group_accuracy": 4,
        "weighted_f1": 6,
    }
    assert counts.counted.keys() == counts.means().keys()
    sums = MeasureSums(measures={"near": Measured(1.0, 4), "far": Measured(0.0, 0)})
    assert sums.counted == {"near": 4, "far": 0}
