"""What hosts are asked to do: train, evaluate, disclose, answer questions, take part in sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.base.worker import Worker
from potluck.client.control.active_instruction import ActiveInstruction
from potluck.client.control.instruction_log import InstructionLog, InstructionStage
from potluck.client.control.update_records import update_record
from potluck.client.disclosure.disclosure_policy import (
    check_held_out,
    check_question,
    check_updates,
    check_weighting,
)
from potluck.client.disclosure.masked_updates import MASKED, write_masked
from potluck.client.disclosure.releases import Discloser, noised, randomness
from potluck.client.disclosure.sum_sessions import SumSessions
from potluck.client.transfer.download import Downloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.client.transfer.saved_states import KeptStates
from potluck.client.transfer.saved_updates import KeptUpdate, KeptUpdates
from potluck.client.transfer.upload import deliver
from potluck.common.disclosure import (
    INTERACTION_MATRIX,
    LABEL_COUNTS,
    TRIPLET,
    Parameters,
    Weighting,
)
from potluck.common.errors import (
    IdentityError,
    ProtocolError,
    ProtocolVersionError,
)
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.task_failures import blamed_on_task
from potluck.common.learning.update_report import UpdateReport
from potluck.common.names import ClientId
from potluck.common.secagg import encode
from potluck.common.tensors.layout import Layout
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

if TYPE_CHECKING:  # importing it imports torch, which only the worker's thread has time for
    from potluck.client.training.auxiliary_files import ReceivedAuxiliaries
    from potluck.client.training.device import Trained, TrainingDevice

log = structlog.get_logger()
Result = TypeVar("Result")

_MOST_NUMBERS = 64
"""In an answer."""


class Duties:
    """Carries out one instruction after another, or several at once. Lives on the event loop; what
    computes is in the worker's thread."""

    def __init__(
        self,
        *,
        clients: frozenset[ClientId],
        link: Link,
        cache: ModelCache,
        downloads: Downloads,
        kept: KeptUpdates,
        states: KeptStates,
        worker: Worker[TrainingDevice],
        discloser: Discloser,
        sums: SumSessions,
        ledger: InstructionLog,
        metrics: HostMetrics,
    ) -> None:
        self._clients = clients
        self._link = link
        self._cache = cache
        self._downloads = downloads
        self._kept = kept
        self._states = states
        self._worker = worker
        self._discloser = discloser
        self._sums = sums
        self._ledger = ledger
        self._metrics = metrics
        self.coordinator_id = ""
        """The coordinator process that speaks."""

    async def do(self, job: ActiveInstruction) -> rpc.Answer | None:
        """What is to be answered; nothing where an update was delivered instead.

        Raises PotluckError, and whatever a plug-in does.
        """
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
        if kind == "check":
            return await self._check(job)
        raise ProtocolVersionError(
            "this host's software does not know what the instruction asks for; update it"
        )

    async def _train(self, job: ActiveInstruction) -> None:
        instruction = job.instruction
        kept = self._kept_for(instruction, job.entry.work)
        fresh = kept is None
        try:
            if kept is None:
                kept = await self._make_update(job)
            self._ledger.move(instruction.id, InstructionStage.UPLOADING)
            await deliver(self._link, kept, self._kept.path(kept.update_id), fresh=fresh)
        finally:
            self._sums.missed(instruction.id)

    def _kept_for(self, instruction: rpc.Instruction, work: str) -> KeptUpdate | None:
        """The update this instruction asks for, if it has been made already."""
        kept = self._kept.find(instruction.id)
        if kept is None:
            return None
        of_this_sum = not kept.masked_input or kept.coordinator_id == self.coordinator_id
        if kept.work == work and of_this_sum:
            return kept
        self._kept.drop(instruction.id)
        return None

    async def _make_update(self, job: ActiveInstruction) -> KeptUpdate:
        instruction, work = job.instruction, job.instruction.train
        weighting, masked = _weighting(work), work.encoding == MASKED
        check_weighting(self._discloser.policy, instruction.client_id, weighting)
        check_updates(self._discloser.policy, instruction.client_id, masked=masked)
        path = self._kept.path(instruction.id)

        def progress(fraction: float) -> None:
            job.entry.fraction = fraction

        def compute(bench: TrainingDevice) -> Trained:
            job.started()
            trained = bench.train(
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
            if job.cancelled.is_set():  # nobody will come to know of these files
                path.unlink(missing_ok=True)
                self._states.path(instruction.id).unlink(missing_ok=True)
            return trained

        with contextlib.ExitStack() as pins:
            pins.enter_context(self._cache.pinned(work.model.blake3))
            model = await self._model(job, work.model, work.task)
            if masked:
                await self._sums.meet(instruction, model)
            auxiliaries = await self._auxiliaries(job, pins)
            trained = await self._compute(job, compute)
        if trained.kept:
            self._states.pend(instruction.run_id, instruction.client_id, instruction.id)
        result = trained.result
        seen = result.steps * trained.settings.batch_size
        self._metrics.trained(seen, result.seconds, result.loss)
        report = trained.report(weighting.tell(result.samples), instruction.round)
        update = (
            update_record(job, trained.file, report)
            if trained.file is not None
            else await self._masked(job, trained, report)
        )
        self._kept.keep(update)
        return update

    async def _masked(
        self, job: ActiveInstruction, trained: Trained, report: UpdateReport
    ) -> KeptUpdate:
        """Mask an update and write it; of its training nothing is said but in the masked head."""
        instruction, update = job.instruction, trained.differences
        assert update is not None  # noqa: S101  # it has no file
        path = self._kept.path(instruction.id)
        file, word = await self._sums.mask(
            instruction.client_id,
            instruction.id,
            lambda masking: write_masked(path, update, report, masking),
        )
        return update_record(
            job,
            file,
            UpdateReport(),
            masked_input=encode(word).hex(),
            coordinator_id=self.coordinator_id,
        )

    async def _auxiliaries(
        self, job: ActiveInstruction, pins: contextlib.ExitStack
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
        from potluck.client.training.auxiliary_files import ReceivedAuxiliaries

        return ReceivedAuxiliaries(
            names=tuple(sent.names),
            shared=shared,
            personal=personal,
            kept=kept,
            keep_at=self._states.path(instruction.id),
        )

    async def _check(self, job: ActiveInstruction) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.check.train
        policy, client = self._discloser.policy, instruction.client_id
        check_weighting(policy, client, _weighting(work))
        check_updates(policy, client, masked=work.encoding == MASKED)

        def compute(bench: TrainingDevice) -> None:
            job.started()
            bench.check(work, instruction.check.layout)

        await self._worker.run(compute)
        return rpc.Answer(instruction_id=instruction.id, checked=rpc.Checked())

    async def _evaluate(self, job: ActiveInstruction) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.evaluate
        check_held_out(self._discloser.policy, instruction.client_id)

        def compute(bench: TrainingDevice) -> EvaluationCounts:
            job.started()
            return bench.evaluate(work, client_id=ClientId(instruction.client_id), model=model)

        with self._cache.pinned(work.model.blake3):
            model = await self._model(job, work.model, work.task)
            counts = await self._compute(job, compute)
        evaluation = rpc.EvaluationCounts(
            loss_sum=counts.loss_sum,
            confusion=counts.confusion.reshape(-1).tolist(),
            group_samples=counts.group_samples.tolist(),
            group_correct=counts.group_correct.tolist(),
        )
        return rpc.Answer(instruction_id=instruction.id, evaluation=evaluation)

    async def _disclose(self, job: ActiveInstruction) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.disclose
        client = ClientId(instruction.client_id)

        def count(bench: TrainingDevice, parameters: Parameters) -> dict[str, Any]:
            job.started()
            if work.signal == LABEL_COUNTS:
                counts = bench.label_counts(work.task, client)
                noise = randomness(self._discloser.policy, client, parameters)
                return {LABEL_COUNTS: noised(counts, parameters, noise)}
            return {INTERACTION_MATRIX: bench.interaction_matrix(work.task, client)}

        async def measure(parameters: Parameters) -> dict[str, Any]:
            if work.signal != TRIPLET:
                return await self._compute(job, lambda bench: count(bench, parameters))

            def estimate(bench: TrainingDevice) -> dict[str, Any]:
                job.started()
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
                return await self._compute(job, estimate)

        profile = await self._discloser.answer(instruction, measure)
        return rpc.Answer(instruction_id=instruction.id, profile=profile)

    async def _question(self, job: ActiveInstruction) -> rpc.Answer:
        instruction, work = job.instruction, job.instruction.question
        check_question(self._discloser.policy, instruction.client_id, work.kind)
        question = await self._compute(job, lambda bench: bench.question(work))

        def compute(bench: TrainingDevice) -> Mapping[str, float]:
            job.started()
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
                values = await self._compute(job, compute)
        else:
            model = None
            values = await self._compute(job, compute)
        told = _wanted(work, values)
        log.info(
            f"answered question '{work.kind}' for {instruction.client_id} to the coordinator of "
            f"federation {self._discloser.asker.federation}, for run {instruction.run_id}",
            **{f"told_{name}": value for name, value in told.items()},
        )
        scalars = rpc.Scalars(values=told)
        return rpc.Answer(instruction_id=instruction.id, scalars=scalars)

    async def _secure(self, job: ActiveInstruction) -> rpc.Answer:
        instruction = job.instruction
        work, client = instruction.secure, ClientId(instruction.client_id)

        def count(bench: TrainingDevice) -> list[int]:
            job.started()
            return bench.label_counts(work.task, client)

        reply = await self._sums.answer(instruction, lambda: self._compute(job, count))
        return rpc.Answer(instruction_id=instruction.id, secure=reply)

    async def _compute(
        self, job: ActiveInstruction, function: Callable[[TrainingDevice], Result]
    ) -> Result:
        """Call a function in a worker's thread. Our own disk's failures are StorageErrors there;
        other OSErrors come from the task."""
        work = getattr(job.instruction, job.instruction.WhichOneof("work") or "")

        def blaming(bench: TrainingDevice) -> Result:
            with blamed_on_task(work.task.name, f"client '{job.instruction.client_id}'"):
                return function(bench)

        return await self._worker.run(blaming)

    async def _model(
        self, job: ActiveInstruction, reference: transfer_pb2.ModelReference, task: rpc.Plugin
    ) -> Path:
        async def layout() -> Layout:
            return await self._compute(job, lambda bench: bench.layout(task))

        self._ledger.move(job.instruction.id, InstructionStage.DOWNLOADING)
        path = await self._downloads.obtain(reference, layout)
        self._ledger.move(job.instruction.id, InstructionStage.QUEUED)
        return path


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
        raise ProtocolVersionError(
            f"question '{work.kind[:40]}' has no number '{missing[0][:40]}' here, it has: {has}; "
            "install the same release on both sides",
        )
    return {name: values[name] for name in work.names[:_MOST_NUMBERS]}


def _weighting(work: rpc.Train) -> Weighting:
    weighting = _WEIGHTINGS.get(work.weighting)
    if weighting is None:
        raise ProtocolVersionError(
            f"this host's software does not know weighting {work.weighting}; update it"
        )
    return weighting
