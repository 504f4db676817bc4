"""Carrying instructions out: each id once, however often it is sent.

Lives on the event loop. What has been met is in the ledger, what takes time is a task per
instruction, what computes is in the worker's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from potluck.client.disclosing import Discloser, noised, randomness
from potluck.client.disclosure_policy import (
    check_held_out,
    check_question,
    check_updates,
    check_weighting,
)
from potluck.client.downloads import Downloads
from potluck.client.host_metrics import HostMetrics
from potluck.client.kept_states import KeptStates
from potluck.client.kept_updates import KeptUpdate, KeptUpdates
from potluck.client.ledger import Entry, Ledger, Reception, Standing
from potluck.client.link import Link
from potluck.client.masked_updates import MASKED, HeadNumbers, write_masked
from potluck.client.model_cache import ModelCache
from potluck.client.secure_sums import SecureSums
from potluck.client.state_directory import storage_error
from potluck.client.uploads import deliver
from potluck.client.worker import Worker
from potluck.common.disclosure import (
    INTERACTION_MATRIX,
    LABEL_COUNTS,
    TRIPLET,
    Parameters,
    Weighting,
)
from potluck.common.errors import (
    DisclosureRefusedError,
    IdentityError,
    PotluckError,
    ProtocolError,
    RoundClosedError,
    StorageError,
    TrainingError,
)
from potluck.common.layout import Layout
from potluck.common.metric_labels import DisclosureOutcome, WorkOutcome
from potluck.common.names import ClientId
from potluck.common.scores import EvaluationCounts
from potluck.common.secagg import encode
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

if TYPE_CHECKING:  # importing it imports torch, which only the worker's thread has time for
    from potluck.client.auxiliary_files import ReceivedAuxiliaries
    from potluck.client.workbench import Trained, Workbench

log = structlog.get_logger()

_MOST_NUMBERS = 64
"""In an answer."""


@dataclass(kw_only=True)
class _Job:
    """Work under way. `cancelled` is polled by the worker's thread."""

    instruction: rpc.Instruction
    entry: Entry
    task: asyncio.Task[None] | None = None
    timeout: asyncio.Timeout | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled.set()
        if self.task is not None:
            self.task.cancel()


class Instructions:
    """What this host has been told to do."""

    def __init__(
        self,
        *,
        clients: frozenset[ClientId],
        link: Link,
        cache: ModelCache,
        downloads: Downloads,
        kept: KeptUpdates,
        states: KeptStates,
        worker: Worker[Workbench],
        discloser: Discloser,
        sums: SecureSums,
        say: Callable[[rpc.AttendRequest], None],
        metrics: HostMetrics,
    ) -> None:
        """`say` sends a message to the coordinator, or drops it while there is no connection:
        what is not yet answered is asked again after a reconnect."""
        self.ledger = Ledger()
        self._clients = clients
        self._link = link
        self._cache = cache
        self._downloads = downloads
        self._kept = kept
        self._states = states
        self._worker = worker
        self._discloser = discloser
        self._sums = sums
        self._say = say
        self._metrics = metrics
        self._jobs: dict[str, _Job] = {}

    def stages(self) -> Mapping[str, int]:
        """Instructions under way, by stage; may be called in any thread."""
        return Counter(job.entry.standing for job in list(self._jobs.values()))

    # What arrives ------------------------------------------------------------------------------

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
        if reception is Reception.BEGIN:
            self._begin(_Job(instruction=instruction, entry=entry))
        elif reception is Reception.GOES_ON:
            self._extend(instruction)
        elif reception is Reception.REPEAT and entry.answer is not None:
            self._say(rpc.AttendRequest(answer=entry.answer))
        elif reception is Reception.REPEAT:
            self._begin(_Job(instruction=instruction, entry=entry))

    def _begin(self, job: _Job) -> None:
        instruction = job.instruction
        if instruction.HasField("train"):
            self._kept.drop_rounds(
                run_id=instruction.run_id,
                client_id=instruction.client_id,
                through=instruction.round - 1,
            )
            if instruction.train.encoding == MASKED:
                self._supersede(instruction)
        self.ledger.move(instruction.id, Standing.QUEUED)
        self._jobs[instruction.id] = job
        job.task = asyncio.create_task(self._perform(job))

    def _supersede(self, instruction: rpc.Instruction) -> None:
        """Stop earlier trainings of the same client for the same run: a coordinator that went down
        has lost the sums they were for, and can't say so."""
        whose = (instruction.run_id, instruction.client_id)
        earlier = [
            job.instruction.id
            for job in self._jobs.values()
            if job.instruction.HasField("train")
            and (job.instruction.run_id, job.instruction.client_id) == whose
        ]
        self._abandon(earlier)

    def _extend(self, instruction: rpc.Instruction) -> None:
        job = self._jobs.get(instruction.id)
        if job is not None and job.timeout is not None and not job.timeout.expired():
            job.timeout.reschedule(_deadline(instruction))

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
        update_id = instruction.id.removesuffix("/settle")
        included = instruction.settle.included
        # What it can't write down now, it is told again with the next training.
        with contextlib.suppress(StorageError):
            self._states.settle(run_id, client_id, update_id, included=included)

    def _stop(self, instruction_id: str) -> None:
        job = self._jobs.get(instruction_id)
        if job is not None:
            job.stop()
            self._metrics.worked(job.instruction.WhichOneof("work"), WorkOutcome.DROPPED)

    async def close(self) -> None:
        """Stop all work; updates that are finished stay on disk."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stop()
        await asyncio.gather(
            *(job.task for job in jobs if job.task is not None), return_exceptions=True
        )

    # Work --------------------------------------------------------------------------------------

    async def _perform(self, job: _Job) -> None:
        """Do the work of one instruction and note its outcome; raises nothing but cancellation."""
        instruction = job.instruction
        bound = log.bind(id=instruction.id, client=instruction.client_id, round=instruction.round)
        answer: rpc.Answer | None = None
        try:
            async with asyncio.timeout_at(_deadline(instruction)) as job.timeout:
                answer = await self._work(job)
            bound.info("done", work=instruction.WhichOneof("work"))
        except TimeoutError:
            bound.warning("dropped, its deadline has passed")
            self._forget(instruction)
            return
        except RoundClosedError as error:
            bound.info("dropped, nobody waits for it", reason=error.message)
            self._forget(instruction)
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

    def _forget(self, instruction: rpc.Instruction) -> None:
        self.ledger.abandon([instruction.id])
        self._kept.drop(instruction.id)
        self._metrics.worked(instruction.WhichOneof("work"), WorkOutcome.DROPPED)

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

    async def _work(self, job: _Job) -> rpc.Answer | None:
        kind = job.instruction.WhichOneof("work")
        if job.instruction.client_id not in self._clients:
            raise IdentityError(
                f"client '{job.instruction.client_id}' is not on this host",
                client=job.instruction.client_id,
            )
        if kind == "train":
            await self._train(job)
            return None
        if kind == "evaluate":
            return await self._evaluate(job)
        if kind == "disclose":
            return await self._disclose(job)
        if kind == "question":
            return await self._question(job)
        if kind == "secure":
            return await self._secure(job)
        raise ProtocolError(
            "this host's software does not know what the instruction asks for; update it"
        )

    async def _train(self, job: _Job) -> None:
        instruction = job.instruction
        kept = self._kept.find(instruction.id)
        fresh = kept is None
        try:
            if kept is None:
                kept = await self._make_update(job)
            self.ledger.move(instruction.id, Standing.UPLOADING)
            await deliver(self._link, kept, self._kept.path(kept.update_id), fresh=fresh)
        finally:
            self._sums.missed(instruction.id)

    async def _make_update(self, job: _Job) -> KeptUpdate:
        instruction, work = job.instruction, job.instruction.train
        weighting, masked = _weighting(work), work.encoding == MASKED
        check_weighting(self._discloser.policy, instruction.client_id, weighting)
        check_updates(self._discloser.policy, instruction.client_id, masked=masked)
        path = self._kept.path(instruction.id)

        def progress(fraction: float) -> None:
            job.entry.fraction = fraction

        def compute(bench: Workbench) -> Trained:
            self._started(job)
            return bench.train(
                work,
                client_id=ClientId(instruction.client_id),
                round_number=instruction.round,
                model=model,
                update=path,
                auxiliaries=auxiliaries,
                progress=progress,
                cancelled=job.cancelled.is_set,
                spare=self._kept.spare.take,
            )

        with contextlib.ExitStack() as pins:
            pins.enter_context(self._cache.pinned(work.model.blake3))
            model = await self._model(job, work.model, work.task)
            if masked:
                await self._sums.meet(instruction, model)
            auxiliaries = await self._auxiliaries(job, pins)
            trained = await self._worker.run(compute)
        if trained.kept:
            self._states.pend(instruction.run_id, instruction.client_id, instruction.id)
        result = trained.result
        seen = result.steps * trained.settings.batch_size
        self._metrics.trained(seen, result.seconds, result.loss)
        told = weighting.tell(result.samples)
        update = (
            self._open(instruction, trained, told)
            if trained.file is not None
            else await self._masked(instruction, trained, told)
        )
        self._kept.keep(update)
        return update

    def _open(self, instruction: rpc.Instruction, trained: Trained, told: int) -> KeptUpdate:
        """The record of an update that is sent as it is. told: samples, as far as disclosed."""
        work, steps = instruction.train, trained.settings.planned_steps(told)
        assert trained.file is not None  # noqa: S101  # whoever calls has looked
        return KeptUpdate(
            update_id=instruction.id,
            client_id=instruction.client_id,
            run_id=instruction.run_id,
            round=instruction.round,
            blake3=trained.file.blake3,
            size=trained.file.size,
            encoding=work.encoding,
            delta=work.delta,
            compressed=work.compressed,
            samples=told,
            steps=steps,
            normalizer=trained.normalizer(steps, instruction.round),
            seconds=trained.seconds,
            loss=trained.result.loss,
            reports=trained.reports(told),
            expires=_expires(instruction),
        )

    async def _masked(
        self, instruction: rpc.Instruction, trained: Trained, told: int
    ) -> KeptUpdate:
        """Mask an update and write it; of its training nothing is said but in the masked head."""
        work, update = instruction.train, trained.differences
        assert update is not None  # noqa: S101  # it has no file
        numbers = HeadNumbers(
            weight=told,
            loss=trained.result.loss,
            normalizer=trained.normalizer(trained.settings.planned_steps(told), instruction.round),
        )
        path = self._kept.path(instruction.id)
        file, word = await self._sums.mask(
            instruction.client_id,
            instruction.id,
            lambda masking: write_masked(path, update, numbers, masking),
        )
        return KeptUpdate(
            update_id=instruction.id,
            client_id=instruction.client_id,
            run_id=instruction.run_id,
            round=instruction.round,
            blake3=file.blake3,
            size=file.size,
            encoding=work.encoding,
            delta=work.delta,
            compressed=False,
            samples=0,
            steps=0,
            seconds=0.0,
            loss=0.0,
            expires=_expires(instruction),
            masked_input=encode(word).hex(),
        )

    async def _auxiliaries(
        self, job: _Job, pins: contextlib.ExitStack
    ) -> ReceivedAuxiliaries | None:
        """Fetch what the strategy sends beside the model; it stays in the cache while pinned."""
        instruction, sent = job.instruction, job.instruction.train.auxiliary
        if not instruction.train.HasField("auxiliary"):
            return None
        kept = self._states.begin(
            instruction.run_id, instruction.client_id, sent.included_update_id
        )
        paths: list[Path | None] = []
        for reference in (sent.shared, sent.personal):
            if not reference.blake3:
                paths.append(None)
                continue
            pins.enter_context(self._cache.pinned(reference.blake3))
            paths.append(await self._model(job, reference, instruction.train.task))
        shared, personal = paths
        if shared is None:
            raise ProtocolError("the strategy's auxiliaries come without a file for all clients")
        from potluck.client.auxiliary_files import ReceivedAuxiliaries

        return ReceivedAuxiliaries(
            names=tuple(sent.names),
            shared=shared,
            personal=personal,
            kept=kept,
            keep_at=self._states.path(instruction.id),
        )

    async def _evaluate(self, job: _Job) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.evaluate
        check_held_out(self._discloser.policy, instruction.client_id)

        def compute(bench: Workbench) -> EvaluationCounts:
            self._started(job)
            return bench.evaluate(work, client_id=ClientId(instruction.client_id), model=model)

        with self._cache.pinned(work.model.blake3):
            model = await self._model(job, work.model, work.task)
            counts = await self._worker.run(compute)
        evaluation = rpc.EvaluationCounts(
            loss_sum=counts.loss_sum,
            confusion=counts.confusion.reshape(-1).tolist(),
            group_samples=counts.group_samples.tolist(),
            group_correct=counts.group_correct.tolist(),
        )
        return rpc.Answer(instruction_id=instruction.id, evaluation=evaluation)

    async def _disclose(self, job: _Job) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.disclose
        client = ClientId(instruction.client_id)

        def count(bench: Workbench, parameters: Parameters) -> dict[str, Any]:
            self._started(job)
            if work.signal == LABEL_COUNTS:
                counts = bench.label_counts(work.task, client)
                noise = randomness(self._discloser.policy, client, parameters)
                return {LABEL_COUNTS: noised(counts, parameters, noise)}
            return {INTERACTION_MATRIX: bench.interaction_matrix(work.task, client)}

        async def measure(parameters: Parameters) -> dict[str, Any]:
            if work.signal != TRIPLET:
                return await self._worker.run(lambda bench: count(bench, parameters))

            def estimate(bench: Workbench) -> dict[str, Any]:
                self._started(job)
                return bench.triplet(
                    work.task,
                    parameters,
                    client,
                    model=model,
                    randomness=randomness(self._discloser.policy, client, parameters),
                    cancelled=job.cancelled.is_set,
                )

            with self._cache.pinned(work.model.blake3):
                model = await self._model(job, work.model, work.task)
                return await self._worker.run(estimate)

        profile = await self._discloser.answer(instruction, measure)
        return rpc.Answer(instruction_id=instruction.id, profile=profile)

    async def _question(self, job: _Job) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.question
        check_question(self._discloser.policy, instruction.client_id, work.kind)
        question = await self._worker.run(lambda bench: bench.question(work))

        def compute(bench: Workbench) -> Mapping[str, float]:
            self._started(job)
            return bench.answer(
                question,
                work,
                client_id=ClientId(instruction.client_id),
                round_number=instruction.round,
                model=model,
                cancelled=job.cancelled.is_set,
            )

        if question.needs_model:
            with self._cache.pinned(work.model.blake3):
                model: Path | None = await self._model(job, work.model, work.task)
                values = await self._worker.run(compute)
        else:
            model = None
            values = await self._worker.run(compute)
        told = _wanted(work, values)
        log.info(
            f"answered question '{work.kind}' for {instruction.client_id} to the coordinator of "
            f"federation {self._discloser.asker.federation}, for run {instruction.run_id}",
            **{f"told_{name}": value for name, value in told.items()},
        )
        scalars = rpc.Scalars(values=told)
        return rpc.Answer(instruction_id=instruction.id, scalars=scalars)

    async def _secure(self, job: _Job) -> rpc.Answer:
        instruction = job.instruction
        work, client = instruction.secure, ClientId(instruction.client_id)

        def count(bench: Workbench) -> list[int]:
            self._started(job)
            return bench.label_counts(work.task, client)

        reply = await self._sums.answer(instruction, lambda: self._worker.run(count))
        return rpc.Answer(instruction_id=instruction.id, secure=reply)

    async def _model(
        self, job: _Job, reference: transfer_pb2.ModelReference, task: rpc.Plugin
    ) -> Path:
        async def layout() -> Layout:
            return await self._worker.run(lambda bench: bench.layout(task))

        self.ledger.move(job.instruction.id, Standing.DOWNLOADING)
        path = await self._downloads.obtain(reference, layout)
        self.ledger.move(job.instruction.id, Standing.QUEUED)
        return path

    def _started(self, job: _Job) -> None:
        """The worker's thread begins with a job."""
        if job.cancelled.is_set():
            raise RoundClosedError("cancelled before it began")
        job.entry.standing = Standing.COMPUTING


_WEIGHTINGS = {
    rpc.WEIGHTING_UNSPECIFIED: Weighting.EXACT,
    rpc.WEIGHTING_EXACT: Weighting.EXACT,
    rpc.WEIGHTING_BUCKETED: Weighting.BUCKETED,
    rpc.WEIGHTING_EQUAL: Weighting.EQUAL,
}


def _wanted(work: rpc.Question, values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that were asked for, and no others."""
    missing = [name for name in work.names[:_MOST_NUMBERS] if name not in values]
    if missing:
        has = ", ".join(values) or "none"
        raise ProtocolError(
            f"question '{work.kind[:40]}' has no number '{missing[0][:40]}' here, it has: {has}; "
            "install the same release on both sides",
        )
    return {name: values[name] for name in work.names[:_MOST_NUMBERS]}


def _weighting(work: rpc.Train) -> Weighting:
    weighting = _WEIGHTINGS.get(work.weighting)
    if weighting is None:
        raise ProtocolError(
            f"this host's software does not know weighting {work.weighting}; update it"
        )
    return weighting


def _deadline(instruction: rpc.Instruction) -> float | None:
    """When the work must be done, by the event loop's clock; None for whenever."""
    if not instruction.HasField("time_left"):
        return None
    left = instruction.time_left.ToTimedelta().total_seconds()
    return asyncio.get_running_loop().time() + left


def _expires(instruction: rpc.Instruction) -> float:
    """When its deadline passes, in seconds since 1970."""
    return time.time() + instruction.time_left.ToTimedelta().total_seconds()


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
