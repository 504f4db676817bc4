"""Checks of the reports that clients send about the trainings behind their updates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from potluck.common.errors import LayoutError, TrainerError
from potluck.common.learning.local_steps import LEAST_NORMALIZER, largest_normalizer
from potluck.common.learning.measures import MOST_COUNTED, checked_measures
from potluck.common.settings.local_training import LocalTraining
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import transfer_pb2
from potluck.server.rounds.plan import RunPlan
from potluck.server.runs.run import Attempt

MOST_SAMPLES: Final = 1 << 40


def check_said(
    plan: RunPlan, attempt: Attempt, client: str, message: transfer_pb2.TrainingReport
) -> None:
    """Check what a client of the current attempt reports about its training. Raises LayoutError."""
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
    """Return the report in a client's message, with those of the selector's numbers that are
    finite."""
    report = UpdateReport.from_message(message)
    reports = {
        name: report.reports[name]
        for name in sorted(plan.reports)
        if name in report.reports and math.isfinite(report.reports[name])
    }
    privacy = plan.run_file.privacy
    if privacy is not None and privacy.at_coordinator:  # numbers of trainings have no noise
        return replace(report, reports=reports, loss=None, measures={})
    # The message always has a loss; it means nothing if the training has noise or no loss.
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
            f"the update reports {report.samples} samples; the number must be from 1 to "
            f"{MOST_SAMPLES}",
            samples=report.samples,
        )
    for name, value in report.not_finite().items():
        raise LayoutError(f"the update reports {value} as its {name}; it must be finite")
    if report.seconds < 0:
        raise LayoutError(
            f"the update reports {report.seconds} s of training; it must be 0 or more"
        )
    if training is None:
        _check_own_steps(report)
        return
    planned = training.planned_steps(report.samples)
    if report.steps > planned:
        raise LayoutError(
            f"an update from {report.samples} samples reports {report.steps} steps; this run takes "
            f"at most {planned}",
            steps=report.steps,
        )
    most = largest_normalizer(training, planned)
    if report.normalizer is not None and not LEAST_NORMALIZER <= report.normalizer <= most:
        raise LayoutError(
            f"an update reports a normalizer of {report.normalizer} for its {report.steps} steps; "
            f"it must be from {LEAST_NORMALIZER} to {most:g}",
            normalizer=report.normalizer,
        )


def _check_own_steps(report: UpdateReport) -> None:
    if report.steps > MOST_COUNTED or report.normalizer is not None:
        raise LayoutError(
            f"an update of a task's own trainer reports {report.steps} steps and the normalizer "
            f"{report.normalizer}; it must report up to {MOST_COUNTED} steps and no normalizer",
            steps=report.steps,
        )
