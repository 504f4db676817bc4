"""Carries out instructions: each id once, even if the coordinator sends it several times.

Runs on the event loop. The log records which ids have arrived. Each instruction in progress is an
asyncio task, and its computations run in a worker's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from potluck.client.base.state_directory import storage_error
from potluck.client.disclosure.disclosure_policy import without_data
from potluck.client.disclosure.outgoing_log import Outgoing, shortened
from potluck.client.handlers.active_instruction import ActiveInstruction, spans_of
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.handler_table import carry_out
from potluck.client.handlers.instruction_log import InstructionStage, Reception, ignored
from potluck.common.errors import (
    DisclosureRefusedError,
    PotluckError,
    RoundClosedError,
    StorageError,
)
from potluck.common.learning.task_failures import crashed
from potluck.common.monitoring.metric_labels import DisclosureOutcome, WorkOutcome
from potluck.common.real_time import seconds_of
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()


class Instructions:
    """Receives this host's instructions, and carries each out once."""

    def __init__(
        self, context: HandlerContext, *, say: Callable[[rpc.AttendRequest], None]
    ) -> None:
        """`say` sends a message to the coordinator, or drops it while there is no connection:
        after a reconnect, the coordinator sends unanswered instructions again."""
        self.log = context.log
        self._context = context
        self._updates, self._states = context.updates, context.states
        self._metrics = context.metrics
        self._say = say
        self._active: dict[str, ActiveInstruction] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # also of stopped instructions, until they end

    def stages(self) -> Mapping[str, int]:
        """Return the number of instructions in progress, by stage; callable in any thread."""
        return Counter(active.entry.stage for active in list(self._active.values()))

    # What arrives ------------------------------------------------------------------------------

    def receive(self, instruction: rpc.Instruction) -> None:
        """Accept a new or repeated instruction and return at once."""
        kind = instruction.WhichOneof("work")
        if kind == "abandon":
            self._abandon(list(instruction.abandon.instruction_ids))
        elif kind == "settle":
            self._settle(instruction)
        acknowledgement = rpc.Acknowledgement(instruction_id=instruction.id)
        self._say(rpc.AttendRequest(acknowledgement=acknowledgement))
        if kind in ("abandon", "settle"):
            return
        reception = self.log.receive(instruction)
        entry = self.log.entry(instruction.id)
        log.debug(
            "instruction received",
            id=instruction.id,
            work=kind,
            reception=reception.value,
            monotonic=time.monotonic(),
        )
        if reception is Reception.GOES_ON and self._extend(instruction):
            return
        if reception is Reception.REFUSE:
            error = RoundClosedError(
                "the instruction was abandoned before it arrived; send the instruction again"
            )
            self._say(rpc.AttendRequest(answer=_failure(instruction.id, error)))
        elif reception is Reception.REPEAT and entry.answer is not None:
            self._say(rpc.AttendRequest(answer=entry.answer))
        else:
            self._begin(ActiveInstruction(instruction=instruction, entry=entry))

    def _begin(self, active: ActiveInstruction) -> None:
        instruction = active.instruction
        self._stop(instruction.id)  # the id now stands for other work, or the deadline has passed
        if instruction.HasField("train"):
            self._supersede(instruction)
        self.log.move(instruction.id, InstructionStage.QUEUED)
        self._active[instruction.id] = active
        active.task = asyncio.create_task(self._perform(active))
        self._tasks.add(active.task)
        active.task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._context.host_sums.changed()

    def _supersede(self, instruction: rpc.Instruction) -> None:
        """Drop the client's other trainings for this run, with their updates.

        A coordinator that was stopped, or restored from a backup, can't report that the other
        trainings are over.
        """
        whose = (instruction.run_id, instruction.client_id)
        others = [
            active.instruction.id
            for active in self._active.values()
            if active.instruction.HasField("train")
            and (active.instruction.run_id, active.instruction.client_id) == whose
            and active.instruction.id != instruction.id
        ]
        self._abandon(others)
        self._updates.drop_others(*whose, update_id=instruction.id)
        self._updates.drop_expired(now=time.time())

    def _extend(self, instruction: rpc.Instruction) -> bool:
        """Set the new deadline of an instruction in progress; return False if the deadline has
        passed.
        """
        active = self._active.get(instruction.id)
        if active is None or (active.timeout is not None and active.timeout.expired()):
            return False
        if active.timeout is not None:
            active.timeout.reschedule(_deadline(instruction))
        return True

    def _abandon(self, instruction_ids: list[str]) -> None:
        for instruction_id in self.log.abandon(instruction_ids):
            log.info("instruction abandoned", id=instruction_id)
            self._stop(instruction_id)
        for instruction_id in instruction_ids:
            self._updates.drop(instruction_id)

    def _settle(self, instruction: rpc.Instruction) -> None:
        run_id, client_id = instruction.run_id, instruction.client_id
        for instruction_id in self.log.settle(
            run_id=run_id, client_id=client_id, round=instruction.round
        ):
            self._stop(instruction_id)
        self._updates.drop_rounds(run_id=run_id, client_id=client_id, through=instruction.round)
        settle = instruction.settle
        # Ignore a disk error: the next training's instruction reports the outcome again.
        with contextlib.suppress(StorageError):
            self._states.settle(run_id, client_id, settle.update_id, included=settle.included)

    def _stop(self, instruction_id: str) -> None:
        active = self._active.pop(instruction_id, None)
        if active is not None:
            active.stop()
            self._metrics.worked(active.instruction.WhichOneof("work"), WorkOutcome.DROPPED)

    async def close(self) -> None:
        """Stop all work; updates that are finished stay on disk."""
        for active in self._active.values():
            active.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._context.host_sums.close()

    # Work --------------------------------------------------------------------------------------

    async def _perform(self, active: ActiveInstruction) -> None:
        """Do the work of one instruction and record its outcome; raise only CancelledError."""
        instruction = active.instruction
        bound = log.bind(id=instruction.id, client=instruction.client_id, round=instruction.round)
        answer: rpc.Answer | None = None
        spans, trouble = spans_of(self._context.tracer, instruction), ""
        if spans is not None:
            spans.enter(active.entry.stage)
            active.entry.listener = spans.enter
        try:
            async with asyncio.timeout_at(_deadline(instruction)) as active.timeout:
                answer = await carry_out(self._context, active)
            bound.info("done", work=instruction.WhichOneof("work"))
        except TimeoutError:
            # Keep the update: a coordinator that was down past the deadline may still request it.
            bound.warning("instruction dropped: its deadline has passed")
            trouble = "its deadline has passed"
            self._drop(active)
            return
        except RoundClosedError as error:
            bound.info("instruction dropped: its result is no longer needed", reason=error.message)
            trouble = error.reason
            self._drop(active)
            self._updates.drop(instruction.id)
            return
        except PotluckError as error:
            answer = self._failed(instruction, error)
        except OSError as error:
            answer = self._failed(
                instruction, storage_error(Path(error.filename or "a file"), error)
            )
        except Exception as error:  # a plug-in may raise anything, and the host must continue
            answer = self._failed(instruction, crashed(error))
            bound.debug("traceback", traceback="".join(traceback.format_exception(error)))
        finally:
            active.cancelled.set()
            if spans is not None:
                failed = answer is not None and answer.HasField("failure")
                spans.end(answer.failure.reason if answer and failed else trouble)
                active.entry.listener = ignored
            if self._active.get(instruction.id) is active:
                del self._active[instruction.id]
        self._count(instruction, answer)
        if answer is not None and answer.HasField("failure"):
            self._log_failure(instruction, answer.failure)
        if self.log.finish(instruction.id, answer) and answer is not None:
            self._say(rpc.AttendRequest(answer=answer))

    def _failed(self, instruction: rpc.Instruction, error: PotluckError) -> rpc.Answer:
        """Log an error in full, and return the answer that may leave the host."""
        log.error(
            "instruction failed",
            id=instruction.id,
            client=instruction.client_id,
            round=instruction.round,
            reason=error.reason,
            message=error.message,
        )
        return _failure(instruction.id, without_data(instruction, error, self._context.policy))

    def _log_failure(self, instruction: rpc.Instruction, failure: rpc.Failure) -> None:
        """Log a failure that is sent, since its reason may disclose something about the data.

        The failure is sent even if it can't be logged."""
        if instruction.client_id in self._context.clients:
            with contextlib.suppress(StorageError):
                self._context.outgoing.note(
                    instruction,
                    Outgoing.FAILURE,
                    reason=failure.reason,
                    message=shortened(failure.message),
                )

    def _drop(self, active: ActiveInstruction) -> None:
        self.log.abandon([active.instruction.id])
        self._metrics.worked(active.instruction.WhichOneof("work"), WorkOutcome.DROPPED)

    def _count(self, instruction: rpc.Instruction, answer: rpc.Answer | None) -> None:
        failed = answer is not None and answer.HasField("failure")
        outcome = WorkOutcome.FAILED if failed else WorkOutcome.DONE
        self._metrics.worked(instruction.WhichOneof("work"), outcome)
        if answer is None or not failed:
            return
        self._metrics.failed(answer.failure.reason)
        if answer.failure.reason == DisclosureRefusedError.reason and instruction.HasField(
            "disclose"
        ):
            self._metrics.disclosed(instruction.disclose.signal, DisclosureOutcome.REFUSED)


def _deadline(instruction: rpc.Instruction) -> float | None:
    """Return the deadline of the work, by the event loop's clock; None for no deadline."""
    if not instruction.HasField("time_left"):
        return None
    return asyncio.get_running_loop().time() + seconds_of(instruction.time_left)


def _failure(instruction_id: str, error: PotluckError) -> rpc.Answer:
    failure = rpc.Failure(reason=error.reason, message=error.message)
    return rpc.Answer(instruction_id=instruction_id, failure=failure)
