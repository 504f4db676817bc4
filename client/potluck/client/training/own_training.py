"""Training of tasks with their own trainer; the trainer's results are checked before use.

Nothing here needs torch, unless the task's model is a torch module.
"""

from __future__ import annotations

import contextlib
import math
import operator
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from potluck.client.disclosure.weightings import is_masked
from potluck.client.private_training import (
    GrantedTraining,
    check_terms,
    hides_records,
    private_loop,
)
from potluck.client.question import OwnAnswers, QuestionContext
from potluck.client.training.plugin_options import json_object
from potluck.client.training.steps.smaller_batches import within_memory
from potluck.client.training.task_training import (
    ClientFiles,
    LoadedTask,
    Outcome,
    TaskTraining,
    TrainingFiles,
)
from potluck.common.disclosure import Weighting
from potluck.common.errors import (
    ConfigurationError,
    LayoutError,
    ProtocolError,
    RoundClosedError,
    TrainerError,
    TrainingError,
)
from potluck.common.learning.measures import MOST_COUNTED, MeasureSums, checked_measures
from potluck.common.learning.task_failures import blamed_on_trainer
from potluck.common.learning.task_loading import numpy_seeded
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import ClientData
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import block_is_within_bounds
from potluck.common.trainer import (
    Capability,
    Contribution,
    EvaluationSettings,
    Measures,
    PrivateTraining,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()

_LOSS = "loss"
FAILED: Final = "the trainer failed in a training with noise; the reason is in the log of the host"
"""Text sent about a failure of a training with noise: the reason could disclose a record."""


class OwnTraining(TaskTraining):
    """Trains and evaluates a task with the task's own trainer."""

    def __init__(self, loaded: LoadedTask, trainer: Trainer) -> None:
        super().__init__(loaded)
        self._trainer = trainer
        if not isinstance(loaded.model, dict):
            _take_a_step()

    def check(self, work: rpc.Train) -> None:
        """Check that the training `work` could begin."""
        self._settings(work)
        if hides_records(work):
            self._check_private(work)

    def _check_private(self, work: rpc.Train) -> None:
        check_terms(work)
        if not isinstance(self.loaded.model, dict):
            private_loop().check_model(self.loaded.model)

    # Training ---------------------------------------------------------------------------------

    def train(
        self, instruction: rpc.Instruction, files: TrainingFiles, progress: TrainingProgress
    ) -> Outcome:
        """Call the trainer, then check its return value and the changed model."""
        work, client = instruction.train, ClientId(instruction.client_id)
        loaded, begun, granted = self.loaded, time.monotonic(), files.granted
        settings = self._settings(work)
        if hides_records(work) != (granted is not None):
            raise ProtocolError(
                "the training has noise but no grant of the ledger, or a grant but no noise"
            )
        data = loaded.client_data(client).train
        progress(0.0)

        def attempt(
            training: LocalTraining, seed: int = work.seed, privacy: PrivateTraining | None = None
        ) -> Contribution:
            self.set_weights(files)
            circumstances = TrainerSettings(
                training=training,
                round=instruction.round,
                seed=seed,
                client=client,
                device=loaded.device,
                reports=frozenset(work.reports),
                place=files.own,
                privacy=privacy,
            )
            with self._blamed(client), _seeded(loaded.model, seed):
                return self._trainer.train(loaded.model, data, circumstances, progress)

        if granted is not None:
            self._check_private(work)
            return self._private(partial(attempt, settings), granted, client, data, begun=begun)
        contribution, _ = within_memory(attempt, settings)
        try:
            contribution = self._checked(contribution, frozenset(work.reports))
            self._check_model()
        except TrainerError:
            loaded.renew()
            raise
        seconds = time.monotonic() - begun
        loss = _loss(contribution.measures)
        return Outcome(
            samples=contribution.samples,
            paced_samples=contribution.samples,
            seen=contribution.samples,
            seconds=seconds,
            loss=math.nan if loss is None else loss,
            report=_reporter(contribution, seconds, masked=is_masked(work)),
        )

    def _private(
        self,
        attempt: Callable[[int, PrivateTraining], Contribution],
        granted: GrantedTraining,
        client: ClientId,
        data: Any,
        *,
        begun: float,
    ) -> Outcome:
        """Train with noise; use nothing that the trainer returns, since that has no noise.

        Raises TrainerError with a fixed message if the trainer fails or exceeds the terms."""
        loaded = self.loaded
        privacy = PrivateTraining(
            sampling_rate=granted.sampling_rate,
            noise_multiplier=granted.noise_multiplier,
            steps=granted.steps,
            clip=granted.clip,
            expected_batch=granted.expected_batch,
            engine=None if isinstance(loaded.model, dict) else private_loop().noisy_steps,
        )
        try:
            with _unchanged_buffers(loaded.model):
                self._checked(attempt(secrets.randbits(63), privacy), frozenset())
            self._require_within_terms(privacy)
            self._check_model()
        except RoundClosedError:
            raise
        except Exception as error:  # its text may depend on records; it stays in this log
            log.error("training with noise failed", client=client, message=str(error))
            loaded.renew()
            raise TrainerError(FAILED) from None
        samples = self._samples(data)
        return Outcome(
            samples=samples,
            paced_samples=samples,
            seen=samples,
            seconds=time.monotonic() - begun,
            loss=math.nan,
            report=partial(_private_report, samples, granted.steps, time.monotonic() - begun),
        )

    def _require_within_terms(self, privacy: PrivateTraining) -> None:
        if not privacy.within_terms:
            raise TrainerError(
                f"the trainer of task '{self.loaded.name}' recorded the steps "
                f"{privacy.taken[:3]}, but the granted terms are {privacy}; train with the "
                "optimizer and the loader of `settings.noisy_steps`, or record at least one step "
                "and no step beyond the terms"
            )

    def _settings(self, work: rpc.Train) -> LocalTraining:
        """Return the run's settings. Raises ConfigurationError if the trainer lacks support."""
        wants = {
            f"the report '{name[:80]}'": name not in self._trainer.capabilities
            for name in work.reports
        }
        wants["corrections of single steps"] = work.HasField("auxiliary")
        wants["limits on the samples of a class"] = bool(work.quotas)
        wants["noise for single records (capability `privacy`)"] = (
            hides_records(work) and Capability.PRIVACY not in self._trainer.capabilities
        )
        wants["training of a client's own model"] = work.HasField("personal")
        for wanted, missing in wants.items():
            if missing:
                raise ConfigurationError(
                    f"the trainer of task '{self.loaded.name}' does not support {wanted}, which "
                    "the run requests; choose another selector or strategy, or remove [personal] "
                    "or [privacy]"
                )
        settings = json_object(work.training_json, "training_json")
        return training_for(self.loaded.task, settings, source="training")

    def set_weights(self, files: ClientFiles) -> None:
        """Load the weights in `files` into the model on the device."""
        self.loaded.set_weights(files)
        if not isinstance(self.loaded.model, dict):
            self.loaded.model.to(self.loaded.device)

    def _checked(self, found: Any, reports: frozenset[str]) -> Contribution:
        whose = f"the trainer of task '{self.loaded.name}'"
        if not isinstance(found, Contribution):
            raise TrainerError(
                f"{whose} returned a {type(found).__name__} from `train`; return a Contribution"
            )
        samples = _whole(found.samples, f"{whose} returned samples =", least=1)
        steps = _whole(found.steps, f"{whose} returned steps =", least=0)
        undeclared = sorted(set(found.reports) - reports)
        if undeclared:
            raise TrainerError(
                f"{whose} reported {undeclared[0][:80]!r}, which the run did not request; "
                f"requested: {', '.join(sorted(reports)) or 'nothing'}"
            )
        return Contribution(
            samples=samples,
            steps=steps,
            measures=checked_measures(found.measures, self._trainer.measures, whose),
            reports={name: float(value) for name, value in found.reports.items()},
        )

    def _check_model(self) -> None:
        """Raise TrainerError unless the model's tensors have the same layout and are finite."""
        loaded, whose = self.loaded, f"the trainer of task '{self.loaded.name}'"
        try:
            arrays = loaded.weights()
            Layout.of(arrays).check_matches(loaded.layout, what="trained model", whose="task")
            kept = loaded.kept_weights()
            loaded.check_base()
        except LayoutError as error:
            raise TrainerError(
                f"{whose} returned a model that is not compatible with the task's model: "
                f"{error.message}"
            ) from error
        for name, array in {**arrays, **kept}.items():
            if array.dtype.kind == "f" and not block_is_within_bounds(array):
                raise TrainerError(
                    f"{whose} left NaN, infinity or huge numbers in tensor '{name[:80]}'; lower "
                    "training.learning_rate, or check the data"
                )

    # Evaluation and questions -----------------------------------------------------------------

    def measured(self, instruction: rpc.Instruction, files: ClientFiles) -> MeasureSums:
        """Return the trainer's metrics, with the counts behind them."""
        client_id = ClientId(instruction.client_id)
        data = self.held_out(client_id, self.loaded.client_data(client_id))
        seed = instruction.evaluate.seed
        return MeasureSums(measures=self._measured(client_id, data, seed, files.own))

    def _measured(self, client_id: ClientId, data: Any, seed: int, own: Path | None) -> Measures:
        circumstances = EvaluationSettings(
            seed=seed, client=client_id, device=self.loaded.device, place=own
        )
        with self._blamed(client_id):
            found = self._trainer.evaluate(self.loaded.model, data, circumstances)
        whose = f"the trainer of task '{self.loaded.name}'"
        if not isinstance(found, Mapping):
            raise TrainerError(
                f"{whose} returned a {type(found).__name__} from `evaluate`; return measures by "
                "name"
            )
        return checked_measures(found, self._trainer.measures, whose)

    def question_context(
        self,
        instruction: rpc.Instruction,
        cancelled: Callable[[], bool],
        files: ClientFiles | None,
        *,
        trained: bool = False,
    ) -> QuestionContext:
        """Return the inputs of an answer, as far as the trainer's capabilities allow."""
        client_id, loaded = ClientId(instruction.client_id), self.loaded
        own = None if files is None else files.own
        if files is not None:
            self.set_weights(files)
        data = loaded.client_data(client_id)

        def mean_loss() -> float:
            self._require(Capability.LOSS)
            measured = self._measured(client_id, data.train, instruction.question.seed, own)
            if _loss(measured) is None:
                raise TrainingError(f"client '{client_id}' has no training samples to measure")
            return measured[_LOSS].mean

        return QuestionContext(
            client=client_id,
            round=instruction.round,
            data=data,
            classes=loaded.task.classes,
            groups=loaded.task.groups,
            device=loaded.device,
            model=loaded.model if trained or files is not None else None,
            cancelled=cancelled,
            pace=instruction.question.pace,
            own=OwnAnswers(
                mean_loss=mean_loss,
                label_counts=lambda: self.label_counts(client_id),
                gradient_norm=lambda: self._gradient_norm(client_id, data.train),
            ),
            local_update=self.local_update(instruction, files, cancelled),
            available=partial(loaded.forecast, client_id),
        )

    def client_data(self, client_id: ClientId) -> ClientData[Any]:
        """Return a client's data, in the form that the trainer takes."""
        return self.loaded.client_data(client_id)

    def label_counts(self, client_id: ClientId) -> list[int]:
        """Return the trainer's counts of a client's training samples by class.

        Raises TrainerError if their sum exceeds the number of samples: the noise assumes that each
        sample counts once.
        """
        self._require(Capability.LABEL_COUNTS)
        data = self.loaded.client_data(client_id).train
        with self._blamed(client_id):
            counts = self._trainer.label_counts(data)
        whose = f"the trainer of task '{self.loaded.name}' counted"
        whole = [_whole(count, whose, least=0) for count in counts]
        if len(whole) != self.loaded.task.classes:
            raise TrainerError(
                f"{whose} samples of {len(whole)} classes, but the task has "
                f"{self.loaded.task.classes} classes"
            )
        with self._blamed(client_id):
            samples = self._samples(data)
        if sum(whole) > samples:
            raise TrainerError(
                f"{whose} {sum(whole)} labels of {samples} samples; count each sample in one class "
                "at most, since the noise on label counts hides one label per sample"
            )
        return whole

    def samples(self, client_id: ClientId) -> int:
        """Return a client's number of training samples, as the trainer counts them."""
        self._require(Capability.PRIVACY)
        data = self.loaded.client_data(client_id).train
        with self._blamed(client_id):
            return self._samples(data)

    def _samples(self, data: Any) -> int:
        whose = f"the trainer of task '{self.loaded.name}' returned samples ="
        return _whole(self._trainer.samples(data), whose, least=0)

    def _gradient_norm(self, client_id: ClientId, data: Any) -> float:
        """Return the gradient norm that the trainer computes."""
        self._require(Capability.GRADIENT_NORM)
        with self._blamed(client_id):
            return float(self._trainer.gradient_norm(self.loaded.model, data))

    def _require(self, capability: Capability) -> None:
        if capability not in self._trainer.capabilities:
            raise TrainingError(
                f"the trainer of task '{self.loaded.name}' does not have the capability "
                f"'{capability.value}'; choose a selector that does not need it, or a task that "
                "has it"
            )

    @contextlib.contextmanager
    def _blamed(self, client: ClientId) -> Iterator[None]:
        """Turn errors of the trainer's code into a one-line TrainerError."""
        try:
            with blamed_on_trainer(self.loaded.name, f"client '{client}'"):
                yield
        except BaseException:
            self.loaded.renew()  # the model's state is unknown
            raise


def _loss(measures: Measures) -> float | None:
    found = measures.get(_LOSS)
    return None if found is None or not found.count else found.mean


def _whole(value: Any, what: str, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not least <= number <= MOST_COUNTED:
        raise TrainerError(
            f"{what} {str(value)[:40]}; it must be a whole number from {least} to {MOST_COUNTED}"
        )
    return number


def _reporter(
    contribution: Contribution, seconds: float, *, masked: bool
) -> Callable[[Weighting], UpdateReport]:
    loss = _loss(contribution.measures)

    def report(weighting: Weighting) -> UpdateReport:
        """Return the report.

        Steps and metrics would disclose the exact number of samples. So they are sent only if that
        number is sent too.
        """
        exact = weighting is Weighting.EXACT and not masked
        return UpdateReport(
            samples=weighting.disclosed(contribution.samples),
            steps=contribution.steps if exact else 0,
            seconds=seconds,
            loss=0.0 if loss is None and masked else loss,  # masked sums need a number
            reports=contribution.reports,
            measures=contribution.measures if exact else {},
        )

    return report


def _private_report(samples: int, steps: int, seconds: float, weighting: Weighting) -> UpdateReport:
    """Return the report of a training with noise; it contains only public values."""
    exact = weighting is Weighting.EXACT
    return UpdateReport(
        samples=weighting.disclosed(samples),
        steps=steps if exact else 0,
        seconds=seconds,
        loss=None,
    )


@contextlib.contextmanager
def _unchanged_buffers(model: Any) -> Iterator[None]:
    """Restore a torch model's buffers after the block: forward passes write them without noise."""
    if isinstance(model, dict):
        yield
        return
    import torch

    buffers = {name: each.clone() for name, each in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, each in model.named_buffers():
            each.copy_(buffers[name])


@contextlib.contextmanager
def _seeded(model: Any, seed: int) -> Iterator[None]:
    """Seed the global generators that a trainer may draw from, and restore them afterwards.

    The whole process shares these generators. If it trains on several devices at once, only numbers
    that the trainer draws from its own seed are reproducible.
    """
    state = random.getstate()
    random.seed(seed)
    torchs = contextlib.nullcontext() if isinstance(model, dict) else _torch_seeded(seed)
    try:
        with numpy_seeded(seed), torchs:
            yield
    finally:
        random.setstate(state)


def _take_a_step() -> None:
    """Take one optimiser step: torch then imports about 800 modules that optimisers need.

    The import takes seconds. Here it happens when the task is loaded, not within a round's
    deadline.
    """
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@contextlib.contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
