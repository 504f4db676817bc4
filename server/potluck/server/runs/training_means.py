"""Means over a round's trainings, as metrics of the round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from potluck.common.learning.coverage import Coverage, coverages
from potluck.common.learning.measures import TRAINING, MeasureSums, added_up
from potluck.common.updates.update_report import UpdateReport

TRAINING_LOSS: Final = f"{TRAINING}loss"


def training_means(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the mean of each metric that a task's own trainer computed in a round's trainings.

    reports: reports of the clients in the model. Each mean is over everything that these clients
    counted for the metric. Metrics without any count are omitted.
    """
    total = added_up(MeasureSums(measures=each.measures) for each in reports)
    return {f"{TRAINING}{name}": mean for name, mean in total.means().items()}


def training_coverage(reports: Sequence[UpdateReport]) -> dict[str, Coverage]:
    """Return the numbers of these clients and samples behind each mean of `training_means`."""
    return _coverage([MeasureSums(measures=each.measures).counted for each in reports])


def loss_coverage(reports: Sequence[UpdateReport]) -> dict[str, Coverage]:
    """Return the numbers of these clients and samples behind `training_loss`."""
    return _coverage([{} if r.loss is None else {"loss": r.samples} for r in reports])


def _coverage(counted: Sequence[Mapping[str, int]]) -> dict[str, Coverage]:
    names = dict.fromkeys(name for each in counted for name in each)
    found = coverages(counted, names)
    return {f"{TRAINING}{name}": replace(each, asked=len(counted)) for name, each in found.items()}


def training_loss(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the mean training loss, weighted by samples, over clients that report one.

    Empty if no client does, as with masked updates.
    """
    told = [(each.loss, each.samples) for each in reports if each.loss is not None]
    weight = sum(samples for _, samples in told)
    if not weight:
        return {}
    losses, samples = np.array(told, dtype=np.float64).T
    return {TRAINING_LOSS: float(losses @ samples) / weight}


def wants_training_loss(measured: Mapping[str, float], every: int) -> bool:
    """Return True if the mean training loss should be a metric of a round of a classification task.

    This is the case if no other loss was computed. measured: metrics of the round's model. every:
    number of rounds from one evaluation to the next.
    """
    return every != 1 or "loss" not in measured
