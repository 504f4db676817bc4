"""The plan and the report of a classification task's training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.client.correction import LocalCorrection
from potluck.client.objective import Objective
from potluck.client.training.ditto import Ditto
from potluck.client.training.objective_sum import composed
from potluck.client.training.plugin_options import created, json_object
from potluck.client.training.steps.loop import UTILITY, TrainingResult, utility
from potluck.common.disclosure import Weighting
from potluck.common.errors import ProtocolVersionError
from potluck.common.learning.local_steps import normalizer
from potluck.common.learning.training import training_for
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Task
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A parsed instruction to train, with its plug-ins made.

    measures_utility: True if the coordinator requests the number `utility`. ditto: training of the
    client's own model; None without one.
    """

    objective: Objective
    settings: LocalTraining
    correction: LocalCorrection | None
    measures_utility: bool
    ditto: Ditto | None = None


def plan_training(work: rpc.Train, task: Task) -> TrainingPlan:
    """Parse an instruction.

    Raises PluginError, ConfigurationError, or ProtocolError if this host can't carry it out."""
    settings = json_object(work.training_json, "training_json")
    correction: LocalCorrection | None = None
    if work.HasField("auxiliary"):
        correction = created(LocalCorrection, work.auxiliary.correction)
    return TrainingPlan(
        objective=composed(
            [created(Objective, each) for each in (work.objective, *work.further_objectives)]
        ),
        settings=training_for(task, settings, source="training"),
        correction=correction,
        measures_utility=_wants_utility(work.reports),
        ditto=Ditto.read(work, task),
    )


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """A finished training, to be reported. mu: weight of the objective's proximal term."""

    result: TrainingResult
    settings: LocalTraining
    mu: float
    round: int

    def report(self, weighting: Weighting) -> UpdateReport:
        """Return the report of the training.

        The reported number of steps is computed from the disclosed number of samples."""
        samples = weighting.disclosed(self.result.samples)
        steps = self.settings.planned_steps(samples)
        disclosed = {
            "samples": samples,
            "steps": steps,
            "normalizer": self._normalizer(steps),
            "reports": self._reports(samples, steps),
        }
        return UpdateReport(**(self.result.values() | disclosed))

    def _reports(self, samples: int, steps: int) -> dict[str, float]:
        """Return the requested numbers for the disclosed samples and steps."""
        loss = self.result.root_mean_square_loss
        if loss is None or not math.isfinite(loss):
            return {}
        met = min(samples, steps * self.settings.batch_size)
        return {UTILITY: utility(met, loss)}

    def _normalizer(self, steps: int) -> float:
        """Return the normalizer of this training for the given number of steps."""
        if steps == self.result.steps:
            return self.result.normalizer
        return normalizer(self.settings, steps, round_number=self.round, mu=self.mu)


def _wants_utility(reports: Sequence[str]) -> bool:
    """Return True if UTILITY is requested. Raises ProtocolVersionError for an unknown number."""
    unknown = sorted(set(reports) - {UTILITY})
    if unknown:
        raise ProtocolVersionError(
            f"this host can't report '{unknown[0][:80]}' with an update; update Potluck on the "
            "host",
            report=unknown[0][:80],
        )
    return UTILITY in reports
