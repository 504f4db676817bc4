"""Training of classification tasks: tasks whose data are `Examples`, by the built-in loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from potluck.client.objective import Objective
from potluck.client.private_training import check_terms, hides_records, private_loop
from potluck.client.question import QuestionContext
from potluck.client.training.auxiliary_files import Arrays, corrected, sendable, write_kept
from potluck.client.training.ditto import halves
from potluck.client.training.lanes.group_training import (
    LaneOutcome,
    Trainee,
    check_members,
    check_rules,
    network_for_lanes,
    train_trainees,
)
from potluck.client.training.lanes.lane_choice import LaneChoice, LaneChoices, measured, subject_of
from potluck.client.training.lanes.lane_steps import LaneRules
from potluck.client.training.processes.worker_count import TrainingMemory, memory_taken
from potluck.client.training.samples import DeviceSamples, positions_within, validation_split
from potluck.client.training.steps.in_turn import train_in_turn
from potluck.client.training.steps.loop import (
    Corrected,
    TrainingContext,
    TrainingResult,
    no_samples,
    train,
)
from potluck.client.training.steps.smaller_batches import within_memory
from potluck.client.training.task_training import (
    ClientFiles,
    GroupMember,
    LoadedTask,
    Outcome,
    TaskTraining,
    TrainedMember,
    TrainingFiles,
    UnfitForLanesError,
)
from potluck.client.training.training_plan import FinishedTraining, TrainingPlan, plan_training
from potluck.client.training.triplet_estimate import (
    EstimateTerms,
    MatrixEstimate,
    estimate_matrix,
)
from potluck.common.disclosure import Parameters, Weighting
from potluck.common.errors import (
    ConfigurationError,
    PotluckError,
    ProtocolError,
    TrainingError,
)
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.optimizers import LocalOptimizer, make_optimizer
from potluck.common.learning.sample_counts import label_counts
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_checks import check_client_data, check_finite, check_labels
from potluck.common.learning.task_failures import blamed_on_task, crashed
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import ClientData, Examples
from potluck.common.tensors.tensor_files import open_tensors
from potluck.common.trainer import TrainingProgress
from potluck.common.updates.kept_states import CORRECTION
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

_Form = tuple[torch.Size, torch.dtype]
"""The form of a sample: its shape and dtype."""


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples that one training uses.

    count: number of samples not held back for validation. positions: indices, among these, of the
    samples that the quotas allow; None for all. validation: the samples held back."""

    training: Examples
    count: int
    positions: torch.Tensor | None
    validation: Examples


class Classification(TaskTraining):
    """Trains and evaluates a classification task on a device."""

    def __init__(self, loaded: LoadedTask) -> None:
        super().__init__(loaded)
        self._device = torch.device(loaded.device)
        self._on_device: DeviceSamples | None = None
        self._choices = LaneChoices(loaded.choices)
        self._settings: LocalTraining | None = None
        self._optimizer: LocalOptimizer | None = None

    def check(self, work: rpc.Train) -> None:
        """Check that the training `work` could begin."""
        plan = plan_training(work, self.loaded.task)
        if hides_records(work):
            check_terms(work)
            private_loop().check(self.loaded.model, plan.objective, plan.settings, plan.correction)

    # Training ---------------------------------------------------------------------------------

    def train(
        self, instruction: rpc.Instruction, files: TrainingFiles, progress: TrainingProgress
    ) -> Outcome:
        """Train with the settings, objective and correction that the instruction names."""
        work, client_id = instruction.train, ClientId(instruction.client_id)
        loaded, plan = self.loaded, plan_training(work, self.loaded.task)
        granted = files.granted
        if hides_records(work) != (granted is not None):
            raise ProtocolError(
                "the training has noise but no grant of the ledger, or a grant but no noise"
            )
        if granted is not None:
            self.check(work)
        data = self.client_data(client_id).train
        samples = self._samples(client_id, work, plan.settings.validation_share)
        correction = _correction(plan, files, loaded, samples)
        progress(0.0)
        context = TrainingContext(
            classes=loaded.task.classes,
            seed=work.seed,
            round=instruction.round,
            device=self._device,
            progress=progress.note,
            cancelled=progress.is_cancelled,
        )
        if plan.ditto is not None:
            first, context = halves(context)
            plan.ditto.train(loaded, samples.training, plan.objective, first, files)

        def attempt(settings: LocalTraining) -> TrainingResult:
            _use_part(loaded.model, work.part if work.HasField("part") else None)
            loaded.set_weights(files)
            loaded.model.to(self._device)  # before an optimiser is made for its tensors
            if granted is not None:
                return private_loop().train(
                    loaded.model,
                    samples.training,
                    plan.objective,
                    settings,
                    context,
                    granted,
                    correction,
                )
            if settings.kept_epochs:
                return train_in_turn(
                    loaded.model,
                    loaded.kept,
                    samples.training,
                    plan.objective,
                    settings,
                    context,
                    corrected=correction,
                    measures_losses=plan.measures_utility,
                )
            return train(
                loaded.model,
                samples.training,
                plan.objective,
                settings,
                context,
                corrected=correction,
                optimizer=self._optimizer_for(settings),
                measures_losses=plan.measures_utility,
            )

        try:
            result, settings = within_memory(attempt, plan.settings)
        except TrainingError as error:
            if type(error) is TrainingError and granted is None:
                # name NaN in the data as the cause, if there is any
                check_finite(data, f"client '{client_id}'")
            raise
        finally:
            _use_part(loaded.model, None)
        kept, sent = _auxiliaries(result, work, files, loaded)
        done = FinishedTraining(
            result=result, settings=settings, mu=plan.objective.proximal, round=instruction.round
        )
        return Outcome(
            samples=result.samples,
            seen=result.steps * settings.batch_size,
            seconds=result.seconds,
            loss=result.loss,
            paced_samples=len(data),
            report=done.report if granted is None else partial(_without_loss, done),
            kept=kept or plan.ditto is not None,
            sent=sent,
        )

    def train_together(
        self, members: Sequence[GroupMember], companions: Sequence[ClientId]
    ) -> Sequence[TrainedMember | PotluckError | UnfitForLanesError]:
        """Train several clients in one batched step, each from its own seed."""
        first, loaded = members[0].instruction, self.loaded
        check_members(members, loaded)
        plan = plan_training(first.train, loaded.task)
        check_rules(plan.settings, plan.objective, self._device)
        network = network_for_lanes(loaded, self._device)
        rules = LaneRules(settings=plan.settings, mu=plan.objective.proximal, round=first.round)
        steps, form = self._planned(companions, plan.settings)
        trainees: list[Trainee] = []
        troubles: dict[int, PotluckError | UnfitForLanesError] = {}
        for member in members:
            try:
                trainees.append(self._trainee(member, plan.settings.validation_share, form))
            except (PotluckError, UnfitForLanesError) as error:
                troubles[member.lane] = error
        if plan.settings.batched == "auto" and trainees:
            # replaces weights that may be NaN after the last training
            loaded.set_weights(members[0].files)
            self._require_faster(trainees[0], plan.objective, rules)
        loaded.set_weights(members[0].files)
        outcomes = (
            train_trainees(trainees, steps, loaded, network, rules, device=self._device)
            if trainees
            else []
        )
        found = {each.member.lane: each for each in trainees}
        trained = dict(zip(found, outcomes, strict=True))
        return [
            troubles.get(member.lane) or self._member_trained(found[member.lane], trained, rules)
            for member in members
        ]

    def _require_faster(self, trainee: Trainee, objective: Objective, rules: LaneRules) -> None:
        """Raise UnfitForLanesError if clients are trained faster one by one."""
        loaded, device = self.loaded, self._device
        sample = trainee.data.inputs_at(torch.zeros(1, dtype=torch.int64).to(device))
        subject = subject_of(loaded.model, sample, rules, device)

        def measure() -> LaneChoice:
            classes = loaded.task.classes
            try:
                return measured(
                    subject, loaded.model, sample, objective, rules, classes=classes, device=device
                )
            except (TrainingError, RuntimeError, ValueError, IndexError, TypeError) as error:
                # Ignore the error: the network may not accept random inputs, and a training on real
                # data reports other causes.
                text = " ".join(str(error).split())[:300]
                raise UnfitForLanesError(
                    f"the speed of batched steps can't be measured: {text}"
                ) from error

        choice = self._choices.of(subject, measure)
        if not choice.together:
            raise UnfitForLanesError(choice.reason)

    def _trainee(self, member: GroupMember, share: float, form: _Form | None) -> Trainee:
        """Return a member with its samples.

        Raises PotluckError for a fault of this member only. Raises UnfitForLanesError if its
        samples don't have this form, so that the member must be trained alone.
        """
        work, client_id = member.instruction.train, ClientId(member.instruction.client_id)
        with self._blamed_on(client_id):
            data = self._samples(client_id, work, share).training
        if len(data) == 0:
            raise no_samples()
        check_labels(data, self.loaded.task.classes, f"client '{client_id}'")
        if _form_of(data) != form:
            raise UnfitForLanesError(
                "the client's samples differ in shape or type from the samples of the other clients"
            )
        member.progress(0.0)
        return Trainee(member=member, data=data)

    def _planned(
        self, companions: Sequence[ClientId], settings: LocalTraining
    ) -> tuple[list[int], _Form | None]:
        """Return each companion's number of steps, and the form of the companions' samples.

        Companions that are not trained now are included. The number is 0 for a companion that can't
        be trained. The form is taken from the first companion that has samples.
        """
        steps, form = [0] * len(companions), None
        for place, client_id in enumerate(companions):
            try:
                with self._blamed_on(client_id):
                    share = settings.validation_share
                    data = self._samples(client_id, rpc.Train(), share).training
                    found = _form_of(data) if len(data) else None
            except PotluckError:
                continue
            form = form or found
            if found is not None and found == form:
                steps[place] = settings.planned_steps(len(data))
        return steps, form

    @contextlib.contextmanager
    def _blamed_on(self, client_id: ClientId) -> Iterator[None]:
        """Turn errors that the task raises for a client's data into a TrainingError."""
        with blamed_on_task(self.loaded.name, f"client '{client_id}'"):
            try:
                yield
            except (PotluckError, OSError):
                raise
            except Exception as error:
                raise crashed(error) from error

    def _member_trained(
        self,
        trainee: Trainee,
        trained: Mapping[int, LaneOutcome | TrainingError],
        rules: LaneRules,
    ) -> TrainedMember | PotluckError:
        outcome = trained[trainee.member.lane]
        client_id = ClientId(trainee.member.instruction.client_id)
        data = self.client_data(client_id).train
        if isinstance(outcome, TrainingError):
            try:  # name NaN in the data as the cause, if there is any
                check_finite(data, f"client '{client_id}'")
            except TrainingError as error:
                return error
            return outcome
        result, settings = outcome.result, rules.settings
        done = FinishedTraining(result=result, settings=settings, mu=rules.mu, round=rules.round)
        return TrainedMember(
            outcome=Outcome(
                samples=result.samples,
                seen=result.steps * settings.batch_size,
                seconds=result.seconds,
                loss=result.loss,
                paced_samples=len(data),
                report=done.report,
            ),
            load=partial(self._load, outcome.weights),
        )

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the weights of a lane into the model."""
        with torch.no_grad():
            for name, tensor in self.loaded.model.named_parameters():
                tensor.copy_(weights[name])

    def client_data(self, client_id: ClientId) -> ClientData:
        """Return a client's data. Raises an error unless they are valid `Examples` of the task."""
        name = self.loaded.name
        return self.loaded.client_data(
            client_id, lambda data: check_client_data(data, name, client_id)
        )

    def _samples(self, client_id: ClientId, work: rpc.Train, share: float) -> _Samples:
        """Return the client's training samples, without those held back, within its quotas."""
        training, validation = validation_split(self.client_data(client_id).train, share, client_id)
        if self._on_device is None:
            self._on_device = DeviceSamples(self._device, sharing=self.loaded.sharing)
        training = self._on_device.of((client_id, share), training)
        positions = positions_within(
            training, work.quotas, classes=self.loaded.task.classes, seed=work.seed
        )
        return _Samples(
            training=training if positions is None else training.subset(positions),
            count=len(training),
            positions=positions,
            validation=validation,
        )

    def _optimizer_for(self, settings: LocalTraining) -> LocalOptimizer:
        """Return the last training's optimiser if it had the same settings; else a new one."""
        if self._optimizer is None or self._settings != settings:
            parameters = [p for p in self.loaded.model.parameters() if p.requires_grad]
            self._optimizer = make_optimizer(parameters, settings, round_number=1)
            self._settings = settings
        return self._optimizer

    def memory_of(
        self, instruction: rpc.Instruction, files: ClientFiles, progress: TrainingProgress
    ) -> TrainingMemory | None:
        """Measure the GPU memory of a training, and discard its results; None if not on a GPU."""
        if self._device.type != "cuda":
            return None
        return memory_taken(
            self._device,
            lambda: self._train_aside(instruction, instruction.train, files, progress),
        )

    # Evaluation and questions -----------------------------------------------------------------

    def measured(self, instruction: rpc.Instruction, files: ClientFiles) -> EvaluationCounts:  # noqa: ARG002 - for trainers
        """Return the model's exact counts on the client's held-out samples."""
        loaded, client_id = self.loaded, ClientId(instruction.client_id)
        held_out = self.held_out(client_id, self.client_data(client_id))
        counts = evaluate(
            loaded.model,
            held_out,
            classes=loaded.task.classes,
            groups=loaded.task.groups,
            device=self._device,
        )
        if not math.isfinite(counts.loss_sum):
            check_finite(held_out, f"the held-out data of client '{client_id}'")
        return counts

    def question_context(
        self,
        instruction: rpc.Instruction,
        cancelled: Callable[[], bool],
        files: ClientFiles | None,
        *,
        trained: bool = False,
    ) -> QuestionContext:
        """Return the inputs of an answer to any kind of question."""
        work, client_id, loaded = instruction.question, instruction.client_id, self.loaded
        if files is not None:
            loaded.set_weights(files)
        return QuestionContext(
            client=ClientId(client_id),
            round=instruction.round,
            data=self.client_data(ClientId(client_id)),
            classes=loaded.task.classes,
            groups=loaded.task.groups,
            device=self._device,
            model=loaded.model if trained or files is not None else None,
            cancelled=cancelled,
            validation_share=min(max(work.validation_share, 0.0), 0.5),
            pace=work.pace,
            local_update=self.local_update(instruction, files, cancelled),
            available=partial(loaded.forecast, ClientId(client_id)),
        )

    # Signals ----------------------------------------------------------------------------------

    def samples(self, client_id: ClientId) -> int:
        """Return a client's number of training samples."""
        return len(self.client_data(client_id).train)

    def label_counts(self, client_id: ClientId) -> list[int]:
        """Return a client's number of training samples per class."""
        return label_counts(self.client_data(client_id).train, self.loaded.task.classes)

    def estimated_matrix(
        self,
        parameters: Parameters,
        client_id: ClientId,
        *,
        seed: int,
        model: Path,
        cancelled: Callable[[], bool],
    ) -> MatrixEstimate:
        """Estimate a client's interaction matrix with the model in the file `model`."""
        terms = EstimateTerms(
            settings=parameters.settings or TripletSettings(),
            seed=seed,
            device=self._device,
            cancelled=cancelled,
        )
        samples, loaded = self.client_data(client_id).train, self.loaded
        with open_tensors(model) as file:
            return estimate_matrix(
                loaded.model, file.arrays, samples, classes=loaded.task.classes, terms=terms
            )


def _form_of(data: Examples) -> _Form:
    """Return the form of a client's samples; it must have at least one."""
    sample = data.inputs_at(torch.zeros(1, dtype=torch.int64, device=data.labels.device))
    return sample.shape[1:], sample.dtype


def _use_part(network: Any, part: int | None) -> None:
    """Select the part of a network to train; None selects all.

    Raises ConfigurationError if a part is selected and the network has none."""
    use = getattr(network, "use_part", None)
    if callable(use):
        use(part)
    elif part is not None:
        raise ConfigurationError(
            f"the coordinator requests the training of part {part}, but the model on this host "
            "has no parts; install the same model on the host and the coordinator",
            part=part,
        )


def _correction(
    plan: TrainingPlan, files: TrainingFiles, loaded: LoadedTask, samples: _Samples
) -> Corrected | None:
    if plan.correction is None or files.auxiliaries is None:
        return None
    return replace(
        corrected(plan.correction, files.auxiliaries, loaded.layout),
        samples=samples.count,
        positions=samples.positions,
        validation=samples.validation,
    )


def _auxiliaries(
    result: TrainingResult, work: rpc.Train, files: TrainingFiles, loaded: LoadedTask
) -> tuple[bool, Arrays | None]:
    """Write what the correction keeps; return whether it keeps anything, and what it sends."""
    outcome, received = result.correction, files.auxiliaries
    if outcome is None or received is None:
        return False, None
    if outcome.keep is not None:
        write_kept(outcome.keep, files.keep_at(CORRECTION))
    return outcome.keep is not None, sendable(outcome.send, work.auxiliary.names, loaded.layout)


def _without_loss(done: FinishedTraining, weighting: Weighting) -> UpdateReport:
    """Return a report without the loss: the loss has no noise, so it must not be sent."""
    return replace(done.report(weighting), loss=None)
