"""A client's update for one round: its training, from an instruction to a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.client.correction import LocalCorrection
from potluck.client.masking.masked_updates import MASKED, Differences, differences
from potluck.client.objective import Objective
from potluck.client.training.auxiliary_files import (
    Arrays,
    ReceivedAuxiliaries,
    corrected,
    sendable,
    write_kept,
)
from potluck.client.training.loaded_tasks import LoadedTask
from potluck.client.training.loop import Corrected, TrainingContext, TrainingResult, train
from potluck.client.training.plugin_options import created, json_object
from potluck.client.training.samples.quotas import within_quotas
from potluck.client.training.samples.validation import validation_split
from potluck.client.training.smaller_batches import within_memory
from potluck.client.training.squared_losses import UTILITY, utility
from potluck.client.training.update_encoding import encoding_of, write_update
from potluck.common.disclosure import Weighting
from potluck.common.errors import ProtocolVersionError, RoundClosedError, TrainingError
from potluck.common.learning.local_steps import normalizer
from potluck.common.learning.task_checks import check_finite
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples, Task
from potluck.common.tensors.encoding import Encoding
from potluck.common.tensors.model_arrays import buffer_names, state_arrays
from potluck.common.tensors.tensor_files import FileDigest, open_tensors
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True, kw_only=True)
class Trained:
    """An update that has been written, or one that is still to be masked.

    mu: weight of the objective's proximal term. kept: whether something was written to be kept.
    simulated_seconds: what the training took on the run's virtual clock, if it has one.
    """

    file: FileDigest | None
    differences: Differences | None
    result: TrainingResult
    settings: LocalTraining
    mu: float
    kept: bool
    simulated_seconds: float | None

    def report(self, weighting: Weighting, round_number: int) -> UpdateReport:
        """The report of the training, where the number of samples is told so exactly.

        Steps are those that as many samples as are told would take. Seconds go with the samples:
        where their number is not told exactly, they are 0.
        """
        samples = weighting.disclosed(self.result.samples)
        steps = self.settings.planned_steps(samples)
        seconds = self.result.seconds if self.simulated_seconds is None else self.simulated_seconds
        disclosed = {
            "samples": samples,
            "steps": steps,
            "seconds": seconds if weighting is Weighting.EXACT else 0.0,
            "normalizer": self.normalizer(steps, round_number),
            "reports": self._reports(samples, steps),
        }
        return UpdateReport(**(self.result.values() | disclosed))

    def _reports(self, samples: int, steps: int) -> dict[str, float]:
        """The numbers asked for, of so many samples and steps as are told."""
        loss = self.result.root_mean_square_loss
        if loss is None or not math.isfinite(loss):
            return {}
        met = min(samples, steps * self.settings.batch_size)
        return {UTILITY: utility(met, loss)}

    def normalizer(self, steps: int, round_number: int) -> float:
        """The normalizer of so many steps of this training."""
        if steps == self.result.steps:
            return self.result.normalizer
        return normalizer(self.settings, steps, round_number=round_number, mu=self.mu)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """An instruction to train as it was read, with its plug-ins made.

    encoding: of the update's file; None where the update is to be masked. measures_utility:
    whether the coordinator wants that number reported.
    """

    encoding: Encoding | None
    objective: Objective
    settings: LocalTraining
    correction: LocalCorrection | None
    measures_utility: bool


@dataclass(frozen=True, kw_only=True)
class TrainingFiles:
    """The files of a training.

    model: to begin with. update: to be written. auxiliaries: what the strategy sent beside the
    model, where it did. spare: gives a file to be written over, if there is one.
    """

    model: Path
    update: Path
    auxiliaries: ReceivedAuxiliaries | None = None
    spare: Callable[[], Path | None] = lambda: None


def plan_training(work: rpc.Train, task: Task) -> TrainingPlan:
    """Read an instruction. Raises PluginError, ConfigurationError, ProtocolError where this host
    can't do what it asks for."""
    settings = json_object(work.training_json, "training_json")
    correction: LocalCorrection | None = None
    if work.HasField("auxiliary"):
        correction = created(LocalCorrection, work.auxiliary.correction)
    return TrainingPlan(
        encoding=None if work.encoding == MASKED else encoding_of(work.encoding),
        objective=created(Objective, work.objective),
        settings=training_for(task, settings, source="training"),
        correction=correction,
        measures_utility=_wants_utility(work.reports),
    )


def train_update(
    loaded: LoadedTask,
    instruction: rpc.Instruction,
    files: TrainingFiles,
    *,
    progress: Callable[[float], None],
    cancelled: Callable[[], bool],
) -> Trained:
    """Train from the model's file and write the update's; one to be masked is returned instead.

    Raises PluginError, ConfigurationError, LayoutError, NotFiniteError, ProtocolError,
    TrainingError, StorageError, and RoundClosedError when cancelled.
    """
    work, client_id = instruction.train, ClientId(instruction.client_id)
    plan = plan_training(work, loaded.task)
    data = loaded.client_data(client_id).train
    samples = _samples(loaded, client_id, work, plan.settings.validation_share)
    correction = _correction(plan, files, loaded)
    if cancelled():
        raise RoundClosedError("the training was cancelled; nobody waits for it")
    context = TrainingContext(
        classes=loaded.task.classes,
        seed=work.seed,
        round=instruction.round,
        device=loaded.device,
        progress=progress,
        cancelled=cancelled,
    )

    def attempt(settings: LocalTraining) -> TrainingResult:
        loaded.set_weights(files.model)
        loaded.model.to(loaded.device)  # before an optimiser is made for its tensors
        return train(
            loaded.model,
            samples,
            plan.objective,
            settings,
            context,
            corrected=correction,
            optimizer=loaded.optimizer(settings),
            measures_losses=plan.measures_utility,
        )

    try:
        result, settings = within_memory(attempt, plan.settings)
    except TrainingError as error:
        if type(error) is TrainingError:  # no learning rate is to blame for NaN in data
            check_finite(data, f"client '{client_id}'")
        raise
    kept, sent = _auxiliaries(result, work, files, loaded)
    return Trained(
        file=_written(work, plan.encoding, files, loaded, sent),
        differences=_differences(files.model, loaded, sent) if plan.encoding is None else None,
        result=result,
        settings=settings,
        mu=plan.objective.proximal,
        kept=kept,
        simulated_seconds=work.pace * len(data) if work.pace else None,
    )


def _samples(loaded: LoadedTask, client_id: ClientId, work: rpc.Train, share: float) -> Examples:
    """The samples that a client trains on: not those kept back, and no more than its quotas."""
    training, _ = validation_split(loaded.client_data(client_id).train, share, client_id)
    training = loaded.on_device(client_id, share, training)
    return within_quotas(training, work.quotas, classes=loaded.task.classes, seed=work.seed)


def _correction(plan: TrainingPlan, files: TrainingFiles, loaded: LoadedTask) -> Corrected | None:
    if plan.correction is None or files.auxiliaries is None:
        return None
    return corrected(plan.correction, files.auxiliaries, loaded.layout)


def _auxiliaries(
    result: TrainingResult, work: rpc.Train, files: TrainingFiles, loaded: LoadedTask
) -> tuple[bool, Arrays | None]:
    """Write what the correction keeps. Whether it keeps anything, and what it sends."""
    outcome, received = result.correction, files.auxiliaries
    if outcome is None or received is None:
        return False, None
    if outcome.keep is not None:
        write_kept(outcome.keep, received.keep_at, loaded.layout)
    return outcome.keep is not None, sendable(outcome.send, work.auxiliary.names, loaded.layout)


def _written(
    work: rpc.Train,
    encoding: Encoding | None,
    files: TrainingFiles,
    loaded: LoadedTask,
    sent: Arrays | None,
) -> FileDigest | None:
    """Write the trained model as an update; nothing where it is to be masked."""
    if encoding is None:
        return None
    return write_update(
        files.update,
        state_arrays(loaded.model),
        encoding=encoding,
        base=files.model if work.delta else None,
        compressed=work.compressed,
        seed=work.seed,
        auxiliaries=sent,
        over=files.spare(),
    )


def _differences(model: Path, loaded: LoadedTask, sent: Arrays | None) -> Differences:
    trained = loaded.model
    with open_tensors(model) as file:
        return differences(state_arrays(trained), file, buffer_names(trained), sent or {})


def _wants_utility(reports: Sequence[str]) -> bool:
    """Raises ProtocolVersionError for a number that this host does not know."""
    unknown = sorted(set(reports) - {UTILITY})
    if unknown:
        raise ProtocolVersionError(
            f"this host's software can't report '{unknown[0][:80]}' with an update; update it",
            report=unknown[0][:80],
        )
    return UTILITY in reports
