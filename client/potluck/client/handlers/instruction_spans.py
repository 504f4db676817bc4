"""The spans of an instruction on its host: all of it, and each stage that it goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from potluck.client.handlers.instruction_log import InstructionStage
from potluck.client.masking.masked_updates import MASKED
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports OpenTelemetry
    from opentelemetry.trace import Span

    from potluck.common.tracing.exporting import Tracer

_NAMES: Final = {
    InstructionStage.DOWNLOADING: "download",
    InstructionStage.COMPUTING: "compute",
    InstructionStage.UPLOADING: "upload",
}
_EXACT: Final = (rpc.WEIGHTING_UNSPECIFIED, rpc.WEIGHTING_EXACT)


class InstructionSpans:
    """Spans of an instruction whose coordinator traces it. The worker's thread may call `enter`,
    while nobody else does."""

    def __init__(self, tracer: Tracer, instruction: rpc.Instruction, parent: Span) -> None:
        work = instruction.WhichOneof("work") or "work"
        about: dict[str, str | int | float] = {
            "potluck.run": instruction.run_id,
            "potluck.round": instruction.round,
            "potluck.client": instruction.client_id,
        }
        self._tracer = tracer
        self._whole = tracer.begin(work, about, parent=parent)
        self._stage: Span | None = None
        train = instruction.train
        # How long a computation takes tells the number of samples; other work does not say how
        # exactly that is told.
        told = train.encoding != MASKED and train.weighting in _EXACT
        self._shows_stages = work == "train" and told

    def enter(self, stage: InstructionStage) -> None:
        """The instruction is in this stage now."""
        if self._stage is not None:
            self._stage.end()
            self._stage = None
        if stage in _NAMES and self._shows_stages:
            self._stage = self._tracer.begin(_NAMES[stage], {}, parent=self._whole)

    def end(self, trouble: str) -> None:
        """It is over. trouble: what went wrong, or empty."""
        from potluck.common.tracing.exporting import fail

        if self._stage is not None:
            self._stage.end()
        if trouble:
            fail(self._whole, trouble)
        self._whole.end()


def spans_of(tracer: Tracer | None, instruction: rpc.Instruction) -> InstructionSpans | None:
    """The spans of an instruction; None where this host or the coordinator does not trace."""
    if tracer is None or not instruction.trace_parent:
        return None
    from potluck.common.tracing.exporting import read

    parent = read(instruction.trace_parent)
    return None if parent is None else InstructionSpans(tracer, instruction, parent)
