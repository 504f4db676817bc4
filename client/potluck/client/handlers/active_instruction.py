"""An instruction that is being carried out, and the trace spans of a training."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Final

from potluck.client.disclosure.weightings import is_masked
from potluck.client.handlers.instruction_log import Entry, InstructionStage
from potluck.common.errors import RoundClosedError
from potluck.common.tracing import Span, Tracer
from potluck.rpc.v1 import coordinator_pb2 as rpc

# The instruction ----------------------------------------------------------------------------------

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
            raise RoundClosedError("the work was cancelled before it began")
        self.entry.enter(InstructionStage.COMPUTING)


# Trace spans --------------------------------------------------------------------------------------

_STAGE_NAMES: Final = {
    InstructionStage.DOWNLOADING: "download",
    InstructionStage.COMPUTING: "compute",
    InstructionStage.UPLOADING: "upload",
}


class InstructionSpans:
    """Spans of a training whose coordinator traces it.

    `enter` may be called from the worker's thread, by one thread at a time."""

    def __init__(self, tracer: Tracer, instruction: rpc.Instruction, parent: Span) -> None:
        about: dict[str, str | int | float] = {
            "potluck.run": instruction.run_id,
            "potluck.round": instruction.round,
            "potluck.client": instruction.client_id,
        }
        self._tracer = tracer
        self._whole = tracer.begin("train", about, parent=parent)
        self._stage: Span | None = None

    def enter(self, stage: InstructionStage) -> None:
        """End the span of the previous stage and begin the span of this stage."""
        if self._stage is not None:
            self._stage.end()
            self._stage = None
        if stage in _STAGE_NAMES:
            self._stage = self._tracer.begin(_STAGE_NAMES[stage], {}, parent=self._whole)

    def end(self, trouble: str) -> None:
        """End the spans. trouble: reason of a failure; empty if there was none."""
        if self._stage is not None:
            self._stage.end()
        if trouble:
            self._tracer.fail(self._whole, trouble)
        self._whole.end()


def spans_of(tracer: Tracer | None, instruction: rpc.Instruction) -> InstructionSpans | None:
    """Return the spans of a training; None if this host or the coordinator does not trace.

    The duration of a training discloses the number of samples. So None is also returned if the
    number is not disclosed exactly, and for instructions other than a training.
    """
    train = instruction.train
    told = not is_masked(train) and train.weighting in _EXACT
    if tracer is None or not instruction.trace_parent:
        return None
    if not instruction.HasField("train") or not told:
        return None
    parent = tracer.read(instruction.trace_parent)
    return None if parent is None else InstructionSpans(tracer, instruction, parent)
