"""The table of handlers, one for each kind of instruction, and the handlers that are short.

Trainings and questions have modules of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.client.disclosure.disclosure_policy import check_held_out, check_question, check_tuning
from potluck.client.disclosure.outgoing_log import Outgoing
from potluck.client.disclosure.releases import ReleaseNoise, randomness
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.question_handler import answer_question
from potluck.client.handlers.training_handler import permitted_weighting, train
from potluck.common.disclosure import Parameters
from potluck.common.errors import IdentityError, ProtocolVersionError
from potluck.common.learning.measures import MeasureSums
from potluck.common.names import ClientId
from potluck.common.signal import signal_named
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

if TYPE_CHECKING:
    from potluck.client.training.device import TrainingDevice


# Checks in advance --------------------------------------------------------------------------------
# Checks that a training could begin, and that the owner's policy allows the data that the run
# needs: the update, answers to questions, counts on held-out samples.


async def check(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer that all checks passed; otherwise raise the error that a training would raise."""
    instruction, work = active.instruction, active.instruction.check
    permitted_weighting(context.policy, instruction.client_id, work.train)
    if work.train.HasField("privacy"):
        await asyncio.to_thread(
            lambda: context.guard().check(instruction.client_id, work.train)
        )  # in a thread: the first call imports a large library
    noisy = work.train.HasField("privacy")
    for kind in work.questions:
        check_question(context.policy, instruction.client_id, kind, noisy=noisy)
    if work.evaluates:
        check_held_out(context.policy, instruction.client_id, least_group=work.least_group)
    await context.compute(
        active, work.train.task, lambda device: device.check(work.train, work.layout)
    )
    if context.trainers is not context.worker:  # so that each process loads the task before a round
        context.trainers.prepare(lambda seat: seat.check(work.train, work.layout))
    return rpc.Answer(instruction_id=instruction.id, checked=rpc.Checked())


# Disclosures --------------------------------------------------------------------------------------


async def disclose(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with a profile: a new one, or the stored one if it was disclosed before."""

    async def measure(parameters: Parameters) -> dict[str, Any]:
        return await _measured(context, active, parameters)

    profile = await context.discloser.answer(active.instruction, measure)
    return rpc.Answer(instruction_id=active.instruction.id, profile=profile)


async def _measured(
    context: HandlerContext, active: ActiveInstruction, parameters: Parameters
) -> dict[str, Any]:
    """Compute the profile's payload, with its noise."""
    work, client = active.instruction.disclose, ClientId(active.instruction.client_id)
    noise = ReleaseNoise(work.signal, parameters, randomness(context.policy, client, parameters))

    async def measured(model: Path | None) -> dict[str, Any]:
        def measure(device: TrainingDevice) -> dict[str, Any]:
            return device.disclosed(
                work,
                parameters,
                client,
                noisy=noise,
                model=model,
                cancelled=active.cancelled.is_set,
            )

        payload = await context.compute(active, work.task, measure)
        noise.check_drawn()
        return payload

    if not signal_named(work.signal).needs_model:
        return await measured(None)
    async with context.model(active, work.model, work.task) as model:
        return await measured(model)


# Evaluations --------------------------------------------------------------------------------------


async def evaluate_held_out(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with counts or metrics. Raises DisclosureRefusedError if the policy forbids the
    evaluation.
    """
    instruction, work = active.instruction, active.instruction.evaluate
    client = ClientId(instruction.client_id)
    check_held_out(context.policy, client, least_group=work.least_group)
    if work.HasField("tuning"):
        check_tuning(context.policy, instruction.client_id)
    async with context.model(active, work.model, work.task) as model:
        files = context.client_files(instruction, model, work.kept)
        found = await context.train(
            active,
            work.task,
            lambda seat: seat.evaluate(
                instruction, files, progress=active.progress, cancelled=active.cancelled.is_set
            ),
        )
    if isinstance(found, MeasureSums):
        return _measures(context, active, found)
    by_class = found.confusion.sum(axis=1)
    context.outgoing.note(
        instruction,
        Outgoing.HELD_OUT,
        model=work.model.blake3,
        task=work.task.name,
        samples=int(by_class.sum()),
        correct=int(found.confusion.trace()),
        loss_sum=found.loss_sum,
        by_class=by_class.tolist(),
        **_subject(work),
    )
    evaluation = rpc.EvaluationCounts(
        loss_sum=found.loss_sum,
        confusion=found.confusion.reshape(-1).tolist(),
        group_samples=found.group_samples.tolist(),
        group_correct=found.group_correct.tolist(),
    )
    return rpc.Answer(instruction_id=instruction.id, evaluation=evaluation)


def _measures(context: HandlerContext, active: ActiveInstruction, found: MeasureSums) -> rpc.Answer:
    """Answer with the metrics that the task's own trainer computed."""
    instruction, work = active.instruction, active.instruction.evaluate
    context.outgoing.note(
        instruction,
        Outgoing.HELD_OUT,
        model=work.model.blake3,
        task=work.task.name,
        measures={name: vars(each) for name, each in found.measures.items()},
        **_subject(work),
    )
    sums = {
        name: transfer_pb2.MeasuredSum(sum=each.sum, count=each.count)
        for name, each in found.measures.items()
    }
    return rpc.Answer(instruction_id=instruction.id, measures=rpc.MeasuredSums(sums=sums))


def _subject(work: rpc.Evaluate) -> dict[str, str]:
    """Return log fields naming the measured model; empty for the model as received."""
    if work.HasField("tuning"):
        return {"subject": "the model after more training"}
    return {"subject": "its own model"} if work.personal else {}


# The table ----------------------------------------------------------------------------------------

Handler = Callable[[HandlerContext, ActiveInstruction], Awaitable[rpc.Answer | None]]
"""Function that carries out an instruction. It returns the answer, or None if an update was
delivered instead. It raises PotluckError, and anything that a plug-in raises."""


async def _step_of_sum(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Take the next step of a secure sum."""
    instruction, task = active.instruction, active.instruction.secure.task
    client = ClientId(instruction.client_id)

    async def count() -> list[int]:
        return await context.compute(active, task, lambda device: device.label_counts(task, client))

    reply = await context.sums.answer(instruction, count)
    return rpc.Answer(instruction_id=instruction.id, secure=reply)


async def _note_selection(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Check and store a document about a selection; answer with the receipt."""
    instruction = active.instruction
    receipt = await asyncio.to_thread(context.selections.take, instruction)
    return rpc.Answer(instruction_id=instruction.id, receipt=receipt)


HANDLERS: Mapping[str, Handler] = {
    "train": train,
    "check": check,
    "evaluate": evaluate_held_out,
    "disclose": disclose,
    "question": answer_question,
    "secure": _step_of_sum,
    "selection": _note_selection,
}
"""The handlers, by the name of the instruction's field that holds the work."""


async def carry_out(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer | None:
    """Carry out an instruction with its handler; see `Handler`."""
    client = active.instruction.client_id
    if client not in context.clients:
        raise IdentityError(f"client '{client}' is not on this host", client=client)
    handler = HANDLERS.get(active.instruction.WhichOneof("work") or "")
    if handler is None:
        raise ProtocolVersionError(
            "this host does not know the kind of work in the instruction; update Potluck on the "
            "host"
        )
    return await handler(context, active)
