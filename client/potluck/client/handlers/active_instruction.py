"""An instruction that is being carried out."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from potluck.client.disclosure.weightings import is_masked
from potluck.client.handlers.instruction_log import Entry, InstructionStage
from potluck.common.errors import RoundClosedError
from potluck.rpc.v1 import coordinator_pb2 as rpc

_EXACT = (rpc.WEIGHTING_UNSPECIFIED, rpc.WEIGHTING_EXACT)


@dataclass(kw_only=True)
class ActiveInstruction:
    """An instruction in progress. The worker's thread polls `cancelled`."""

    instruction: rpc.Instruction
    entry: Entry
    task: asyncio.Task[None] | None = None
    timeout: asyncio.Timeout | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def progress(self, fraction: float) -> None:
        """Record the share of the computation that is done.

        Nothing is recorded if the update is masked or the number of samples is not disclosed
        exactly: the speed of the progress would disclose that number."""
        train = self.instruction.train
        if not is_masked(train) and train.weighting in _EXACT:
            self.entry.fraction = fraction

    def stop(self) -> None:
        """Cancel the work; its result is no longer wanted."""
        self.cancelled.set()
        if self.task is not None:
            self.task.cancel()

    def started(self) -> None:
        """Record that the computation begins. Raises RoundClosedError if it was cancelled."""
        if self.cancelled.is_set():
            raise RoundClosedError("cancelled before it began")
        self.entry.enter(InstructionStage.COMPUTING)
