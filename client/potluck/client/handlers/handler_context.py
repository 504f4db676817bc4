"""The parts of a host that the handlers of instructions share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.worker import Worker
from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.outgoing_log import OutgoingLog
from potluck.client.disclosure.releases import Discloser
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.host_sums import HostSums
from potluck.client.handlers.instruction_log import InstructionLog, InstructionStage
from potluck.client.handlers.measured_workers import MeasuredWorkers
from potluck.client.handlers.repeated_failures import RepeatedFailures
from potluck.client.handlers.selection_guard import NoGuard, SelectionGuard
from potluck.client.handlers.sum_participant import SumParticipant
from potluck.client.handlers.training_groups import TrainingGroups
from potluck.client.private_training import PrivacyGuard
from potluck.client.transfer.download import Downloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.saved_states import KeptStates, OwnFiles
from potluck.client.transfer.saved_updates import KeptUpdates
from potluck.common.learning.task_failures import blamed_on_task
from potluck.common.names import ClientId
from potluck.common.tensors.layout import Layout
from potluck.common.tracing import Tracer
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.training.device import TrainingDevice
    from potluck.client.training.processes.training_seat import TrainingSeat
    from potluck.client.training.task_training import ClientFiles

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class HandlerContext:
    """The parts of a host, for handlers. Runs on the event loop.

    Trainings and evaluations run in the threads of `trainers`, other computations in the threads of
    `worker`. Both may be the same object."""

    clients: frozenset[ClientId]
    policy: DisclosurePolicy
    log: InstructionLog
    link: Link
    downloads: Downloads
    updates: KeptUpdates
    host_sums: HostSums
    states: KeptStates
    own_files: OwnFiles
    worker: Worker[TrainingDevice]
    trainers: Worker[TrainingSeat]
    groups: TrainingGroups
    discloser: Discloser
    outgoing: OutgoingLog
    sums: SumParticipant
    metrics: HostMetrics
    failures: RepeatedFailures
    guard: Callable[[], PrivacyGuard]
    """Function that returns the guard of trainings with noise. It raises PluginError or
    MissingLibraryError."""
    selections: SelectionGuard = field(default_factory=NoGuard)
    measured: MeasuredWorkers | None = None
    tracer: Tracer | None = None

    async def compute(
        self,
        active: ActiveInstruction,
        task: rpc.Plugin,
        function: Callable[[TrainingDevice], Result],
    ) -> Result:
        """Do an instruction's computation in a worker's thread.

        Raises RoundClosedError if it was cancelled while it was queued.
        """

        def begin(device: TrainingDevice) -> Result:
            active.started()
            return function(device)

        return await self.look_up(active, task, begin)

    async def train(
        self,
        active: ActiveInstruction,
        task: rpc.Plugin,
        function: Callable[[TrainingSeat], Result],
    ) -> Result:
        """Do a training or an evaluation in a thread of `trainers`; otherwise like `compute`."""

        def begin(seat: TrainingSeat) -> Result:
            active.started()
            with blamed_on_task(task.name, f"client '{active.instruction.client_id}'"):
                return function(seat)

        return await self.trainers.run(begin)

    async def look_up(
        self,
        active: ActiveInstruction,
        task: rpc.Plugin,
        function: Callable[[TrainingDevice], Result],
    ) -> Result:
        """Call a function in a worker's thread, without a change of the instruction's stage.

        Potluck's own disk errors are StorageErrors. Any other OSError comes from the task.
        """

        def blaming(device: TrainingDevice) -> Result:
            with blamed_on_task(task.name, f"client '{active.instruction.client_id}'"):
                return function(device)

        return await self.worker.run(blaming)

    def client_files(
        self, instruction: rpc.Instruction, model: Path, kept: rpc.KeptState
    ) -> ClientFiles:
        """Return the files needed to evaluate a model at a client. Raises StateLostError."""
        from potluck.client.training.task_training import ClientFiles

        whose = (instruction.run_id, instruction.client_id)
        return ClientFiles(
            model=model,
            kept=self.states.find(*whose, kept.included_update_id, kept.purposes),
            own=self.own_files.folder(*whose),
        )

    @contextlib.asynccontextmanager
    async def model(
        self, active: ActiveInstruction, reference: transfer_pb2.ModelReference, task: rpc.Plugin
    ) -> AsyncIterator[Path]:
        """Yield a model's file, downloaded if needed; it is not deleted while the block runs."""

        async def layout() -> Layout:
            return await self.look_up(active, task, lambda device: device.layout(task))

        with self.downloads.cache.pinned(reference.blake3):
            self.log.move(active.instruction.id, InstructionStage.DOWNLOADING)
            path = await self.downloads.obtain(reference, layout)
            self.log.move(active.instruction.id, InstructionStage.QUEUED)
            yield path
