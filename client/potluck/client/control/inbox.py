"""Carrying instructions out: each id once, however often it is sent.

Lives on the event loop. What has been met is in the ledger, what takes time is a task per
instruction, what computes is in the worker's thread.
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

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.state_directory import storage_error
from potluck.client.control.active_instruction import ActiveInstruction
from potluck.client.control.handlers import Duties
from potluck.client.control.instruction_log import InstructionLog, InstructionStage, Reception
from potluck.client.transfer.saved_states import KeptStates
from potluck.client.transfer.saved_updates import KeptUpdates
from potluck.common.errors import (
    DisclosureRefusedError,
    PotluckError,
    RoundClosedError,
    StorageError,
    TrainingError,
)
from potluck.common.metrics.metric_labels import DisclosureOutcome, WorkOutcome
from potluck.rpc.v1 import coordinator_pb2 as rpc

log = structlog.get_logger()


class Instructions:
    """What this host has been told to do."""

    def __init__(
        self,
        *,
        duties: Duties,
        ledger: InstructionLog,
        kept: KeptUpdates,
        states: KeptStates,
        say: Callable[[rpc.AttendRequest], None],
        metrics: HostMetrics,
    ) -> None:
        """`say` sends a message to the coordinator, or drops it while there is no connection:
        what is not yet answered is asked again after a reconnect."""
        self.ledger = ledger
        self._duties = duties
        self._kept = kept
        self._states = states
        self._say = say
        self._metrics = metrics
        self._jobs: dict[str, ActiveInstruction] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # those of stopped jobs among them

    def stages(self) -> Mapping[str, int]:
        """Instructions under way, by stage; may be called in any thread."""
        return Counter(job.entry.stage for job in list(self._jobs.values()))

    # What arrives ------------------------------------------------------------------------------

    def coordinator_is(self, coordinator_id: str) -> None:
        """Another coordinator process speaks from now on; it sends again what it waits for."""
        self.ledger.forget_overtaken()
        self._duties.coordinator_id = coordinator_id

    def receive(self, instruction: rpc.Instruction) -> None:
        """Take an instruction, new or repeated; returns at once."""
        kind = instruction.WhichOneof("work")
        if kind == "abandon":
            self._abandon(list(instruction.abandon.instruction_ids))
        elif kind == "settle":
            self._settle(instruction)
        acknowledgement = rpc.Acknowledgement(instruction_id=instruction.id)
        self._say(rpc.AttendRequest(acknowledgement=acknowledgement))
        if kind in ("abandon", "settle"):
            return
        reception = self.ledger.receive(instruction)
        entry = self.ledger.entry(instruction.id)
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
            error = RoundClosedError("it was abandoned before it arrived; send it again")
            self._say(rpc.AttendRequest(answer=_failure(instruction.id, error)))
        elif reception is Reception.REPEAT and entry.answer is not None:
            self._say(rpc.AttendRequest(answer=entry.answer))
        else:
            self._begin(ActiveInstruction(instruction=instruction, entry=entry))

    def _begin(self, job: ActiveInstruction) -> None:
        instruction = job.instruction
        self._stop(instruction.id)  # other work under its id, or work past its deadline
        if instruction.HasField("train"):
            self._supersede(instruction)
        self.ledger.move(instruction.id, InstructionStage.QUEUED)
        self._jobs[instruction.id] = job
        job.task = asyncio.create_task(self._perform(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)

    def _supersede(self, instruction: rpc.Instruction) -> None:
        """Drop what other trainings of the same client for the same run began and left: a
        coordinator that went down, or back to a backup, can't say that they are over."""
        whose = (instruction.run_id, instruction.client_id)
        others = [
            job.instruction.id
            for job in self._jobs.values()
            if job.instruction.HasField("train")
            and (job.instruction.run_id, job.instruction.client_id) == whose
            and job.instruction.id != instruction.id
        ]
        self._abandon(others)
        self._kept.drop_others(*whose, update_id=instruction.id)
        self._kept.drop_expired(now=time.time())

    def _extend(self, instruction: rpc.Instruction) -> bool:
        """Give the work on an instruction the time it has now; false if its time is over."""
        job = self._jobs.get(instruction.id)
        if job is None or (job.timeout is not None and job.timeout.expired()):
            return False
        if job.timeout is not None:
            job.timeout.reschedule(_deadline(instruction))
        return True

    def _abandon(self, instruction_ids: list[str]) -> None:
        for instruction_id in self.ledger.abandon(instruction_ids):
            log.info("abandoned", id=instruction_id)
            self._stop(instruction_id)
        for instruction_id in instruction_ids:
            self._kept.drop(instruction_id)

    def _settle(self, instruction: rpc.Instruction) -> None:
        run_id, client_id = instruction.run_id, instruction.client_id
        for instruction_id in self.ledger.settle(
            run_id=run_id, client_id=client_id, round=instruction.round
        ):
            self._stop(instruction_id)
        self._kept.drop_rounds(run_id=run_id, client_id=client_id, through=instruction.round)
        settle = instruction.settle
        # What it can't write down now, it is told again with the next training.
        with contextlib.suppress(StorageError):
            self._states.settle(run_id, client_id, settle.update_id, included=settle.included)

    def _stop(self, instruction_id: str) -> None:
        job = self._jobs.pop(instruction_id, None)
        if job is not None:
            job.stop()
            self._metrics.worked(job.instruction.WhichOneof("work"), WorkOutcome.DROPPED)

    async def close(self) -> None:
        """Stop all work; updates that are finished stay on disk."""
        for job in self._jobs.values():
            job.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Work --------------------------------------------------------------------------------------

    async def _perform(self, job: ActiveInstruction) -> None:
        """Do the work of one instruction and note its outcome; raises nothing but cancellation."""
        instruction = job.instruction
        bound = log.bind(id=instruction.id, client=instruction.client_id, round=instruction.round)
        answer: rpc.Answer | None = None
        try:
            async with asyncio.timeout_at(_deadline(instruction)) as job.timeout:
                answer = await self._duties.do(job)
            bound.info("done", work=instruction.WhichOneof("work"))
        except TimeoutError:
            # What it has made stays: a coordinator that was away longer may ask for it again.
            bound.warning("dropped, its deadline has passed")
            self._drop(job)
            return
        except RoundClosedError as error:
            bound.info("dropped, nobody waits for it", reason=error.message)
            self._drop(job)
            self._kept.drop(instruction.id)
            return
        except PotluckError as error:
            answer = _failure(instruction.id, error)
        except OSError as error:
            answer = _failure(
                instruction.id, storage_error(Path(error.filename or "a file"), error)
            )
        except Exception as error:  # a plug-in may raise anything, and the host must live on
            answer = _failure(instruction.id, _crash(error))
            bound.debug("traceback", traceback="".join(traceback.format_exception(error)))
        finally:
            job.cancelled.set()
            if self._jobs.get(instruction.id) is job:
                del self._jobs[instruction.id]
        self._count(instruction, answer)
        if answer is not None and answer.HasField("failure"):
            bound.error("failed", reason=answer.failure.reason, message=answer.failure.message)
        if self.ledger.finish(instruction.id, answer) and answer is not None:
            self._say(rpc.AttendRequest(answer=answer))

    def _drop(self, job: ActiveInstruction) -> None:
        self.ledger.abandon([job.instruction.id])
        self._metrics.worked(job.instruction.WhichOneof("work"), WorkOutcome.DROPPED)

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
    """When the work must be done, by the event loop's clock; None for whenever."""
    if not instruction.HasField("time_left"):
        return None
    left = instruction.time_left.ToTimedelta().total_seconds()
    return asyncio.get_running_loop().time() + left


def _failure(instruction_id: str, error: PotluckError) -> rpc.Answer:
    failure = rpc.Failure(reason=error.reason, message=error.message)
    return rpc.Answer(instruction_id=instruction_id, failure=failure)


def _crash(error: Exception) -> TrainingError:
    """An exception nobody foresaw, in one line, with where it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {Path(frame[0].filename).name}:{frame[0].lineno}" if frame else ""
    text = " ".join(str(error).split())[:500]
    return TrainingError(
        f"{type(error).__name__}{where}: {text or 'no message'}; see that the task fits its data"
    )
