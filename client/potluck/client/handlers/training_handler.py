"""The instruction to train: trains a client and delivers its update."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from potluck.client.disclosure.disclosure_policy import (
    DisclosurePolicy,
    check_correction,
    check_pace,
    check_question,
    check_selection,
    check_updates,
    check_weighting,
)
from potluck.client.disclosure.outgoing_log import Outgoing, shortened
from potluck.client.disclosure.weightings import is_masked, weighting_of
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.instruction_log import InstructionStage, digest_of_training
from potluck.client.handlers.question_handler import numbers_asked
from potluck.client.private_training import (
    GrantedTraining,
    UpdateNoise,
    check_terms,
    hides_update,
)
from potluck.client.training.plugin_options import json_object
from potluck.client.training.summable_updates import SUM
from potluck.client.transfer.saved_updates import KeptUpdate, update_record
from potluck.client.transfer.upload import deliver
from potluck.common.disclosure import Weighting
from potluck.common.errors import (
    DisclosureRefusedError,
    PluginError,
    PotluckError,
    ProtocolError,
    ProtocolVersionError,
    RoundClosedError,
    StorageError,
    TrainingError,
    UnreachableError,
)
from potluck.common.learning.task_failures import blamed_on_task, crashed
from potluck.common.monitoring.metric_labels import TrainingWay
from potluck.common.names import ClientId
from potluck.common.updates.kept_states import CORRECTION, PURPOSES
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from potluck.client.training.auxiliary_files import ReceivedAuxiliaries
    from potluck.client.training.local_update import Trained
    from potluck.client.training.processes.training_seat import TrainingSeat
    from potluck.client.training.task_training import TrainingFiles
    from potluck.client.training.unmasked_update import Differences


log = structlog.get_logger()

_NOT_OF_THE_DATA = (
    PluginError,
    ProtocolError,
    RoundClosedError,
    StorageError,
    UnreachableError,
)
"""Errors of a training that do not depend on the client's samples."""


async def train(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer | None:
    """Train and deliver the update; if the update exists already, only deliver it again.

    If the instruction has a question, return the question's answer and keep the update here.
    """
    instruction, update_id = active.instruction, active.instruction.id
    await asyncio.to_thread(context.selections.check, instruction)
    weighting = _check_policy(context, instruction)
    kept = _kept(context, active)
    fresh = kept is None
    try:
        if kept is None:
            kept = await _make_update(context, active, weighting)
        if instruction.train.HasField("before_upload"):
            return _offer(context, instruction, kept)
        if kept.offer:  # updates without an offer have already been logged
            _note(context, instruction, kept)
        context.log.move(update_id, InstructionStage.UPLOADING)
        if kept.encoding == SUM:
            await context.host_sums.deliver(active, kept, fresh=fresh)
        else:
            await deliver(context.link, kept, context.updates.path(update_id), fresh=fresh)
    finally:
        context.sums.close(instruction)
    return None


def _offer(context: HandlerContext, instruction: rpc.Instruction, kept: KeptUpdate) -> rpc.Answer:
    """Log and return the answer that is sent before an update is uploaded."""
    context.outgoing.note(
        instruction,
        Outgoing.ANSWER,
        question=instruction.train.before_upload.kind,
        parameters=shortened(instruction.train.before_upload.parameters_json),
        model=kept.blake3,
        task=instruction.train.task.name,
        numbers=kept.offer,
        samples=kept.report.samples,
    )
    offer = rpc.Offer(answer=rpc.Scalars(values=kept.offer), samples=kept.report.samples)
    return rpc.Answer(instruction_id=instruction.id, offer=offer)


def permitted_weighting(policy: DisclosurePolicy, client: str, work: rpc.Train) -> Weighting:
    """Return how the number of samples is disclosed with an update.

    Raises DisclosureRefusedError if the owner's policy forbids the weighting or the update.
    """
    weighting = weighting_of(work)
    check_weighting(policy, client, weighting)
    check_pace(policy, client, work.pace)
    check_selection(policy, client, verified=work.selection.hosts_verify)
    check_updates(policy, client, masked=is_masked(work), private=work.HasField("privacy"))
    correction = work.auxiliary.correction.name
    alike = json_object(work.training_json, "training_json").get("steps")
    if correction and not is_masked(work) and not alike:
        check_correction(policy, client, correction)
    return weighting


def _check_policy(context: HandlerContext, instruction: rpc.Instruction) -> Weighting:
    """Return how the number of samples is disclosed with the update.

    Raises DisclosureRefusedError if the owner's policy forbids the update or its offer. It then
    drops an update that was made under an earlier policy.
    """
    work, client = instruction.train, instruction.client_id
    try:
        weighting = permitted_weighting(context.policy, client, work)
        if work.HasField("before_upload"):
            check_question(context.policy, client, work.before_upload.kind)
    except DisclosureRefusedError:
        context.updates.drop(instruction.id)
        raise
    return weighting


def _kept(context: HandlerContext, active: ActiveInstruction) -> KeptUpdate | None:
    """Return the update that the instruction asks for; None if it has not been made yet."""
    kept = context.updates.find(active.instruction.id)
    if kept is None:
        return None
    of_this_sum = not kept.masked_input or kept.coordinator_id == context.log.coordinator_id
    asked = active.instruction.train.HasField("before_upload")
    of_this_training = kept.work == digest_of_training(active.instruction)
    if of_this_training and of_this_sum and (kept.offer or not asked):
        return kept
    context.updates.drop(active.instruction.id)
    return None


async def _make_update(
    context: HandlerContext, active: ActiveInstruction, weighting: Weighting
) -> KeptUpdate:
    instruction, work = active.instruction, active.instruction.train
    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(context.model(active, work.model, work.task))
        if is_masked(work):
            await context.sums.meet(instruction, model)
        kept = _begin_keeping(context, instruction)
        auxiliaries = await _auxiliaries(context, active, stack, kept.get(CORRECTION))

        from potluck.client.training.task_training import TrainingFiles

        files = TrainingFiles(
            model=model,
            kept=kept,
            update=context.updates.path(instruction.id),
            keep_at=partial(context.states.path, instruction.id),
            auxiliaries=auxiliaries,
            spare=context.updates.spare.take,
            own=context.own_files.folder(instruction.run_id, instruction.client_id),
        )
        noise = None
        if hides_update(work):
            check_terms(work)
            noise = await asyncio.to_thread(lambda: context.guard().hide_update(instruction))
        elif work.HasField("privacy"):
            files = replace(files, granted=await _granted(context, active))
        elif context.measured is not None:
            await context.measured.settle(active, files)
        trained = await _train(context, active, files)
    if trained is None:
        update = await _masked(context, active, None, UpdateReport(), noise)
        context.updates.keep(update)
        return update
    outcome = trained.outcome
    if outcome.kept:
        context.states.pend(instruction.run_id, instruction.client_id, instruction.id)
    # The speed would disclose the number of samples, so record metrics only if the run sends the
    # exact number anyway.
    if trained.file is not None and weighting is Weighting.EXACT:
        context.metrics.trained(outcome.seen, outcome.seconds, outcome.loss)
    report = trained.report(weighting)
    if trained.file is None:
        assert trained.differences is not None  # noqa: S101  # it is one or the other
        update = await _masked(context, active, trained.differences, report, noise)
    else:
        offer = numbers_asked(work.before_upload, trained.offer)
        update = update_record(
            active.instruction,
            trained.file,
            report,
            work=digest_of_training(active.instruction),
            offer=offer,
        )
        if not offer:
            _note(context, instruction, update)
    context.updates.keep(update)
    return update


async def _granted(context: HandlerContext, active: ActiveInstruction) -> GrantedTraining:
    """Record the privacy loss of a training with noise in the client's ledger, before it begins.

    Raises DisclosureRefusedError if the loss would exceed the owner's limit.
    """
    instruction, work = active.instruction, active.instruction.train
    check_terms(work)
    client = ClientId(instruction.client_id)
    samples = await context.look_up(active, work.task, lambda device: device.samples(work, client))
    granted, spent = await asyncio.to_thread(_charged, context, instruction, samples)
    context.metrics.spent_on_trainings(client, spent, limit=context.policy.training_limit)
    return granted


def _charged(
    context: HandlerContext, instruction: rpc.Instruction, samples: int
) -> tuple[GrantedTraining, float]:
    """Record a training's privacy loss; return the granted terms and the ε spent so far."""
    guard = context.guard()
    granted = guard.grant(instruction, samples)
    return granted, guard.spent(instruction.client_id)


async def _train(
    context: HandlerContext, active: ActiveInstruction, files: TrainingFiles
) -> Trained | None:
    """Train the client. Returns None if a training for a secure sum failed.

    The coordinator must not learn of the failure: it could make a model on which training fails if,
    and only if, a given record is among the client's samples. So the client uploads zeros, and the
    reason stays in the host's log. Metrics don't count the failure: an operator may scrape them.
    """
    instruction = active.instruction
    try:
        trained = await _train_together(context, active, files)
        context.metrics.trains(TrainingWay.ALONE if trained is None else TrainingWay.BATCHED)
        return trained or await _train_alone(context, active, files)
    except _NOT_OF_THE_DATA:
        raise
    except Exception as error:
        if not is_masked(instruction.train):
            raise
        found = error if isinstance(error, PotluckError) else crashed(error)
        log.error(
            "training failed; zeros go into the secure sum",
            client=instruction.client_id,
            round=instruction.round,
            message=found.message,
        )
        return None


async def _train_together(
    context: HandlerContext, active: ActiveInstruction, files: TrainingFiles
) -> Trained | None:
    """Train the client in one batched step with its companions; None if that can't be done."""
    from potluck.client.training.task_training import UnfitForLanesError

    if not context.groups.wanted(active.instruction):
        return None
    try:
        return await context.groups.train(active, files)
    except UnfitForLanesError:
        return None


async def _train_alone(
    context: HandlerContext, active: ActiveInstruction, files: TrainingFiles
) -> Trained:
    instruction = active.instruction

    def compute(seat: TrainingSeat) -> Trained:
        cancelled = active.cancelled.is_set
        try:
            with blamed_on_task(instruction.train.task.name, f"client '{instruction.client_id}'"):
                trained = seat.train(
                    instruction, files, progress=active.progress, cancelled=cancelled
                )
        except BaseException as error:
            context.states.discard(instruction.id)
            repeated = None
            if isinstance(error, TrainingError):
                repeated = context.failures.note(error, instruction.client_id)
            if repeated is None:
                raise
            seat.restart()
            raise repeated from error
        context.failures.note_success()
        if cancelled():  # delete the files: no record refers to them
            files.update.unlink(missing_ok=True)
            context.states.discard(instruction.id)
        return trained

    if is_masked(instruction.train):  # train in this process, where masking needs the tensors
        return await context.compute(active, instruction.train.task, compute)
    return await context.train(active, instruction.train.task, compute)


def _note(context: HandlerContext, instruction: rpc.Instruction, update: KeptUpdate) -> None:
    """Log an update without masks that is about to be sent; sums have their own ledger."""
    report = update.report
    measures = {name: vars(each) for name, each in report.measures.items()}
    context.outgoing.note(
        instruction,
        Outgoing.UPDATE,
        model=instruction.train.model.blake3,
        task=instruction.train.task.name,
        blake3=update.blake3,
        bytes=update.size,
        weighting=weighting_of(instruction.train).value,
        report=report.values() | {"measures": measures},
    )


async def _masked(
    context: HandlerContext,
    active: ActiveInstruction,
    differences: Differences | None,
    report: UpdateReport,
    noise: UpdateNoise | None,
) -> KeptUpdate:
    """Mask an update, or zeros if there is none, and write the file. The report is masked too."""
    instruction = active.instruction
    path = context.updates.path(instruction.id)
    file, word = await context.sums.mask(instruction, path, differences, report, noise)
    if noise is not None:
        client = instruction.client_id
        spent = await asyncio.to_thread(context.guard().spent, client)
        context.metrics.spent_on_trainings(client, spent, limit=context.policy.training_limit)
    return update_record(
        instruction,
        file,
        UpdateReport(),
        work=digest_of_training(instruction),
        masked_input=word,
        coordinator_id=context.log.coordinator_id,
    )


def _begin_keeping(context: HandlerContext, instruction: rpc.Instruction) -> Mapping[str, Path]:
    """Return the files of the client's kept states, by purpose.

    Raises StateLostError, or ProtocolVersionError for a purpose that this host can't keep."""
    work = instruction.train
    if not work.HasField("kept"):
        return {}
    unknown = sorted(set(work.kept.purposes) - PURPOSES)
    if unknown:
        raise ProtocolVersionError(
            f"this host can't store a state for '{unknown[0][:40]}'; update Potluck on the host"
        )
    return context.states.begin(
        instruction.run_id,
        instruction.client_id,
        work.kept.included_update_id,
        work.kept.purposes,
    )


async def _auxiliaries(
    context: HandlerContext,
    active: ActiveInstruction,
    stack: contextlib.AsyncExitStack,
    kept: Path | None,
) -> ReceivedAuxiliaries | None:
    """Fetch the tensors that the strategy sends in addition to the model.

    Their files are kept until the stack is closed.
    """
    instruction, sent = active.instruction, active.instruction.train.auxiliary
    task = instruction.train.task
    if not instruction.train.HasField("auxiliary"):
        return None
    paths: list[Path | None] = []
    for reference in (sent.shared, sent.personal):
        there = bool(reference.blake3)
        paths.append(
            await stack.enter_async_context(context.model(active, reference, task))
            if there
            else None
        )
    shared, personal = paths
    if shared is None:
        raise ProtocolError(
            "the instruction lacks the file with the strategy's auxiliary tensors for all clients"
        )
    from potluck.client.training.auxiliary_files import ReceivedAuxiliaries

    return ReceivedAuxiliaries(
        names=tuple(sent.names),
        shared=shared,
        personal=personal,
        kept=kept,
    )
