"""The interface that trains and measures clients: a device in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from potluck.common.errors import PotluckError
from potluck.common.learning.measures import MeasureSums
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the working thread may do so
    from potluck.client.training.local_update import Trained
    from potluck.client.training.processes.worker_count import TrainingMemory
    from potluck.client.training.task_training import (
        ClientFiles,
        GroupMember,
        TrainingFiles,
        UnfitForLanesError,
    )


class TrainingSeat(Protocol):
    """A place that runs one training at a time.

    Used by one thread. `TrainingDevice` documents what its methods do and raise."""

    def check(self, work: rpc.Train, layout: bytes) -> None:
        """Check that the training `work` could begin; loads its task."""
        ...

    def train(
        self,
        instruction: rpc.Instruction,
        files: TrainingFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> Trained:
        """Train a client and write its update."""
        ...

    def train_together(
        self, members: Sequence[GroupMember], companions: Sequence[ClientId]
    ) -> Sequence[Trained | PotluckError | UnfitForLanesError]:
        """Train clients in one batched step and write their updates."""
        ...

    def memory_of(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> TrainingMemory | None:
        """Measure the GPU memory of a training. Returns None if it can't be measured."""
        ...

    def evaluate(
        self,
        instruction: rpc.Instruction,
        files: ClientFiles,
        *,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> EvaluationCounts | MeasureSums:
        """Measure a model on a client's held-out samples."""
        ...

    def restart(self) -> None:
        """Discard all loaded tasks, models and data; used after repeated failures."""
        ...
