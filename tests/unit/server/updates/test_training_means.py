"""Metrics of a round that come from its trainings."""

from __future__ import annotations

import pytest

from potluck.common.learning.spread import Coverage
from potluck.common.trainer import Measured
from potluck.common.updates.update_report import UpdateReport
from potluck.server.updates.report_checks import (
    loss_coverage,
    training_coverage,
    training_loss,
    training_means,
    wants_training_loss,
)


def report(loss: float | None, samples: int = 1, **measures: Measured) -> UpdateReport:
    return UpdateReport(loss=loss, samples=samples, measures=measures)


def test_training_loss_of_a_round_is_the_mean_weighted_by_samples() -> None:
    assert training_loss([report(1.0, 30), report(3.0, 10)]) == {"training_loss": 1.5}
    assert training_loss([report(2.0, 5), report(None, 10**6)]) == {"training_loss": 2.0}
    assert training_loss([report(None, 5)]) == {}
    assert training_loss([]) == {}


def test_metrics_of_a_trainer_are_means_weighted_by_their_counts() -> None:
    reports = [
        report(None, near=Measured(3.0, 4), far=Measured(0.0, 0)),
        report(None, near=Measured(1.0, 4)),
    ]
    assert training_means(reports) == {"training_near": 0.5}


def test_coverage_of_training_metrics_counts_clients_and_samples() -> None:
    reports = [report(1.0, 30, near=Measured(3.0, 4)), report(None, 5, near=Measured(0.0, 0))]
    assert training_coverage(reports) == {"training_near": Coverage(clients=1, asked=2, samples=4)}
    assert loss_coverage(reports) == {"training_loss": Coverage(clients=1, asked=2, samples=30)}
    assert training_coverage([]) == loss_coverage([]) == {}


@pytest.mark.parametrize(
    ("measured", "every", "wanted"),
    [
        ({"loss": 0.5, "accuracy": 0.9}, 1, False),  # the evaluated loss is better
        ({}, 1, True),  # no client has samples to evaluate on
        ({}, 0, True),
        ({}, 5, True),
        ({"loss": 0.5}, 5, True),  # evaluations every 5 rounds leave gaps
    ],
)
def test_training_loss_is_recorded_if_some_rounds_are_not_evaluated(
    measured: dict[str, float], every: int, wanted: bool
) -> None:
    assert wants_training_loss(measured, every) is wanted
