"""Checks the reports that clients send about their trainings, and computes means over them as
metrics of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from potluck.common.errors import LayoutError, TrainerError
from potluck.common.learning.local_steps import LEAST_NORMALIZER, largest_normalizer
from potluck.common.learning.measures import (
    MOST_COUNTED,
    TRAINING,
    MeasureSums,
    added_up,
    checked_measures,
)
from potluck.common.learning.spread import Coverage, coverages
from potluck.common.settings.local_training import LocalTraining
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import transfer_pb2
from potluck.server.live.run import Attempt
from potluck.server.plan.plan import RunPlan

# Checks -------------------------------------------------------------------------------------------

MOST_SAMPLES: Final = 1 << 40


def check_said(
    plan: RunPlan, attempt: Attempt, client: str, message: transfer_pb2.TrainingReport
) -> None:
    """Check the report of a client in the current attempt about its training. Raises
    LayoutError."""
    report = UpdateReport.from_message(message)
    check_report(report, None if plan.trainer is not None else _training(plan, attempt, client))
    try:
        checked_measures(report.measures, plan.measures, f"client '{client}'")
    except TrainerError as error:
        raise LayoutError(error.message) from error


def _training(plan: RunPlan, attempt: Attempt, client: str) -> LocalTraining:
    """Return the training settings of one client of the cohort."""
    training, member = plan.training, attempt.cohort.get(client)
    epochs = None if member is None else member.work.epochs
    return training if epochs is None else training.model_copy(update={"epochs": epochs})


def report_said(plan: RunPlan, message: transfer_pb2.TrainingReport) -> UpdateReport:
    """Return the report in a client's message. Numbers for the selector are kept only if they are
    finite."""
    report = UpdateReport.from_message(message)
    reports = {
        name: report.reports[name]
        for name in sorted(plan.reports)
        if name in report.reports and math.isfinite(report.reports[name])
    }
    privacy = plan.run_file.privacy
    # Clients report loss and metrics without noise, which a run with noise must not use.
    if privacy is not None and privacy.at_coordinator:
        return replace(report, reports=reports, loss=None, measures={})
    # The message always has a loss, which must be ignored if the training has noise or no loss.
    said = (not plan.measures or "loss" in plan.measures) and privacy is None
    return replace(report, reports=reports, loss=report.loss if said else None)


def check_report(report: UpdateReport, training: LocalTraining | None) -> None:
    """Check that a client's reported training is possible, because strategies use its numbers as
    weights.

    training: the settings of the built-in loop; None if the task has its own trainer.

    Raises LayoutError.
    """
    if not 1 <= report.samples <= MOST_SAMPLES:
        raise LayoutError(
            f"the update reports {report.samples} samples; the number of samples must be from 1 "
            f"to {MOST_SAMPLES}",
            samples=report.samples,
        )
    for name, value in report.not_finite().items():
        raise LayoutError(
            f"the update reports the value {value} as `{name}`; this value must be finite"
        )
    if report.seconds < 0:
        raise LayoutError(
            f"the update reports {report.seconds} s of training; the time must be ≥ 0"
        )
    if training is None:
        _check_own_steps(report)
        return
    planned = training.planned_steps(report.samples)
    if report.steps > planned:
        raise LayoutError(
            f"an update from {report.samples} samples reports {report.steps} steps; this run "
            f"allows at most {planned} steps",
            steps=report.steps,
        )
    most = largest_normalizer(training, planned)
    if report.normalizer is not None and not LEAST_NORMALIZER <= report.normalizer <= most:
        raise LayoutError(
            f"an update reports a normalizer of {report.normalizer} for {report.steps} steps; "
            f"the normalizer must be from {LEAST_NORMALIZER} to {most:g}",
            normalizer=report.normalizer,
        )


def _check_own_steps(report: UpdateReport) -> None:
    if report.steps > MOST_COUNTED or report.normalizer is not None:
        raise LayoutError(
            f"an update of a task's own trainer reports {report.steps} steps and the normalizer "
            f"{report.normalizer}; it must report up to {MOST_COUNTED} steps and no normalizer",
            steps=report.steps,
        )


# Means over a round -------------------------------------------------------------------------------

TRAINING_LOSS: Final = f"{TRAINING}loss"


def training_means(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the mean of each metric that a task's own trainer computed in a round's trainings.

    reports: reports of the clients in the model. Each mean is over all items, such as samples, that
    these clients counted for the metric. Metrics without any count are omitted.
    """
    total = added_up(MeasureSums(measures=each.measures) for each in reports)
    return {f"{TRAINING}{name}": mean for name, mean in total.means().items()}


def training_coverage(reports: Sequence[UpdateReport]) -> dict[str, Coverage]:
    """Return the numbers of clients and samples from which each mean of `training_means` is
    computed."""
    return _coverage([MeasureSums(measures=each.measures).counted for each in reports])


def loss_coverage(reports: Sequence[UpdateReport]) -> dict[str, Coverage]:
    """Return the numbers of clients and samples from which `training_loss` is computed."""
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
