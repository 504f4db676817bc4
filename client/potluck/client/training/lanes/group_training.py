"""Training of several clients of a classification task in one batched step, with its conditions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.client.objective import Objective
from potluck.client.training.lanes.lane_network import LaneNetwork, stacked
from potluck.client.training.lanes.lane_steps import (
    ClientLane,
    LaneResult,
    LaneRules,
    train_lanes,
)
from potluck.client.training.objective_sum import ObjectiveSum
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.objectives.fedprox import FedProx
from potluck.client.training.steps.loop import TrainingResult
from potluck.client.training.task_training import GroupMember, LoadedTask, UnfitForLanesError
from potluck.common.errors import DeviceMemoryError, TrainingError
from potluck.common.learning.local_steps import normalizer
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.rpc.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A client that is trained together with others, with its samples (at least one)."""

    member: GroupMember
    data: Examples


@dataclass(frozen=True, kw_only=True)
class LaneOutcome:
    """Result of one trainee. weights: by name; each is a view into the weights of all trainees."""

    result: TrainingResult
    weights: Mapping[str, Tensor]


def check_members(members: Sequence[GroupMember], loaded: LoadedTask) -> None:
    """Raise UnfitForLanesError if the members' trainings differ, or clients keep tensors."""
    first = members[0]
    for member in members:
        theirs, ours = member.instruction.train, first.instruction.train
        if _common(theirs) != _common(ours) or member.files.model != first.files.model:
            raise UnfitForLanesError("the clients' trainings differ")
    if loaded.kept:
        raise UnfitForLanesError("batched steps don't support tensors that clients keep")


def check_rules(settings: LocalTraining, objective: Objective, device: torch.device) -> None:
    """Raise UnfitForLanesError for settings or objectives that lanes don't support."""
    terms = objective.terms if isinstance(objective, ObjectiveSum) else (objective,)
    if settings.optimizer != "sgd":
        raise UnfitForLanesError(f"batched steps don't support the optimiser {settings.optimizer}")
    if settings.precision != "float32" and device.type != "cpu":
        raise UnfitForLanesError(
            f"batched steps on a GPU don't support the precision {settings.precision}"
        )
    if settings.kept_epochs or settings.smallest_batch_size is not None:
        raise UnfitForLanesError(
            "batched steps don't support training.kept_epochs and training.smallest_batch_size"
        )
    if sum(type(term) is CrossEntropy for term in terms) != 1 or not all(
        type(term) in (CrossEntropy, FedProx) for term in terms
    ):
        raise UnfitForLanesError(
            "batched steps support only the objectives cross-entropy and fedprox"
        )


def network_for_lanes(loaded: LoadedTask, device: torch.device) -> LaneNetwork:
    """Return the task's network, prepared to train several clients (lanes) in one step. Raises
    UnfitForLanesError."""
    network = LaneNetwork(loaded.model)
    if network.drops and device.type != "cpu":
        raise UnfitForLanesError("batched steps on a GPU don't support dropout")
    return network


def train_trainees(
    trainees: Sequence[Trainee],
    steps: Sequence[int],
    loaded: LoadedTask,
    network: LaneNetwork,
    rules: LaneRules,
    *,
    device: torch.device,
) -> list[LaneOutcome | TrainingError]:
    """Train all trainees from the loaded model's weights. steps: planned number for each lane.

    Raises RoundClosedError when all are cancelled, DeviceMemoryError, TrainingError.
    """
    started = time.monotonic()
    lanes = [ClientLane(steps=each) for each in steps]
    for trainee in trainees:
        place = trainee.member.lane
        seed = trainee.member.instruction.train.seed
        lanes[place] = ClientLane(steps=steps[place], data=trainee.data.to(device), seed=seed)
    state = {name: each.to(device) for name, each in loaded.model.state_dict().items()}

    def progress(share: float) -> None:
        for trainee in trainees:
            trainee.member.progress.note(share)

    def cancelled() -> bool:
        return all(trainee.member.progress.is_cancelled() for trainee in trainees)

    found = _explained(
        lambda: train_lanes(
            network,
            stacked(state, network.names, len(lanes)),
            lanes,
            rules,
            progress=progress,
            cancelled=cancelled,
        ),
        device,
    )
    seconds = time.monotonic() - started
    total = sum(steps[trainee.member.lane] for trainee in trainees)
    outcomes: list[LaneOutcome | TrainingError] = []
    for trainee in trainees:
        place = trainee.member.lane
        result = found[place]
        assert result is not None  # noqa: S101  # it has data
        if result.is_finite():
            share = seconds * steps[place] / total
            outcomes.append(_outcome(trainee, result, network, rules, steps[place], share))
        else:
            outcomes.append(_diverged(rules))
    return outcomes


def _outcome(
    trainee: Trainee,
    found: LaneResult,
    network: LaneNetwork,
    rules: LaneRules,
    steps: int,
    seconds: float,
) -> LaneOutcome:
    amount = normalizer(rules.settings, steps, round_number=rules.round, mu=rules.mu)
    return LaneOutcome(
        result=TrainingResult(
            samples=len(trainee.data),
            steps=steps,
            normalizer=amount,
            seconds=seconds,
            loss=found.loss,
        ),
        weights=dict(zip(network.names, found.weights, strict=True)),
    )


def _diverged(rules: LaneRules) -> TrainingError:
    rate = rules.settings.learning_rate_in(rules.round)
    return TrainingError(
        f"training diverged: loss or weights are NaN or infinite at learning rate {rate:g}; lower "
        "training.learning_rate or set training.gradient_clip",
        learning_rate=rate,
    )


def _explained(
    train: Callable[[], list[LaneResult | None]], device: torch.device
) -> list[LaneResult | None]:
    """Call `train`; turn the errors that torch raises into a TrainingError."""
    try:
        return train()
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{device} has too little memory to train these clients at once; set "
            "training.batched = false, or use another device",
            device=device,
        ) from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        raise TrainingError(
            f"the task's model failed: {text}; check that the task's model, inputs and labels "
            "are compatible"
        ) from error


def _common(work: rpc.Train) -> tuple[object, ...]:
    """Return the parts of a training that must be equal for all companions."""
    objectives = (work.objective, *work.further_objectives)
    return (
        work.task.SerializeToString(deterministic=True),
        tuple(each.SerializeToString(deterministic=True) for each in objectives),
        work.training_json,
        tuple(work.companions),
    )
