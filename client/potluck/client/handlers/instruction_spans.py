"""The trace spans of a training on its host: one for the whole training, one for each stage."""

from __future__ import annotations

from typing import Final

from potluck.client.disclosure.weightings import is_masked
from potluck.client.handlers.instruction_log import InstructionStage
from potluck.common.tracing.tracer import Span, Tracer
from potluck.rpc.v1 import coordinator_pb2 as rpc

_NAMES: Final = {
    InstructionStage.DOWNLOADING: "download",
    InstructionStage.COMPUTING: "compute",
    InstructionStage.UPLOADING: "upload",
}
_EXACT: Final = (rpc.WEIGHTING_UNSPECIFIED, rpc.WEIGHTING_EXACT)


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
        if stage in _NAMES:
            self._stage = self._tracer.begin(_NAMES[stage], {}, parent=self._whole)

    def end(self, trouble: str) -> None:
        """End the spans. trouble: what went wrong, or empty."""
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
