"""The instruction to answer a question before a selection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from potluck.client.disclosure.disclosure_policy import check_pace, check_question
from potluck.client.disclosure.outgoing_log import Outgoing, shortened
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.errors import ProtocolVersionError
from potluck.rpc.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:  # imports torch, which takes seconds: only the worker's thread may do so
    from potluck.client.question import Question
    from potluck.client.training.task_training import ClientFiles

log = structlog.get_logger()

_MOST_NUMBERS = 1024
"""Maximum number of values in an answer."""


async def answer_question(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with the requested numbers. Raises DisclosureRefusedError if the policy forbids it."""
    instruction, work = active.instruction, active.instruction.question
    noisy = work.HasField("privacy")
    check_question(context.policy, instruction.client_id, work.kind, noisy=noisy)
    check_pace(context.policy, instruction.client_id, work.pace)
    question = await context.look_up(active, work.task, lambda device: device.question(work))
    if noisy and not question.hides_records:
        raise ProtocolVersionError(
            f"this host can't answer question '{work.kind[:40]}' with noise; choose a selector "
            "that does not ask it, or remove [privacy] from the run file"
        )
    values = None
    if noisy:
        values = await asyncio.to_thread(lambda: context.guard().kept_answer(instruction))
    if values is None:
        values = await _computed(context, active, question)
    disclosed = numbers_asked(work, values)
    context.outgoing.note(
        instruction,
        Outgoing.ANSWER,
        question=work.kind,
        parameters=shortened(work.parameters_json),
        model=work.model.blake3 if question.needs_model else "",
        task=work.task.name,
        numbers=disclosed,
    )
    log.info(
        f"answered question '{work.kind}' about client {instruction.client_id} in run "
        f"{instruction.run_id} of federation {context.discloser.asker.federation}",
        **{f"told_{name}": value for name, value in disclosed.items()},
    )
    return rpc.Answer(instruction_id=instruction.id, scalars=rpc.Scalars(values=disclosed))


async def _computed(
    context: HandlerContext, active: ActiveInstruction, question: Question
) -> Mapping[str, float]:
    """Compute an answer; if it has noise, record its privacy loss in the client's ledger."""
    instruction, work = active.instruction, active.instruction.question
    cancelled = active.cancelled.is_set
    async with contextlib.AsyncExitStack() as stack:
        files: ClientFiles | None = None
        if question.needs_model:
            model = await stack.enter_async_context(context.model(active, work.model, work.task))
            files = context.client_files(instruction, model, work.kept)
        if not work.HasField("privacy"):
            return await context.compute(
                active,
                work.task,
                lambda device: device.answer(question, instruction, files, cancelled=cancelled),
            )
        sums, samples = await context.compute(
            active,
            work.task,
            lambda device: device.bounded_sums(question, instruction, files, cancelled=cancelled),
        )

    def charged() -> tuple[Mapping[str, float], float]:
        guard = context.guard()
        return guard.answer(instruction, sums, samples), guard.spent(instruction.client_id)

    answer, spent = await asyncio.to_thread(charged)
    limit = context.policy.training_limit
    context.metrics.spent_on_trainings(instruction.client_id, spent, limit=limit)
    return answer


def numbers_asked(work: rpc.Question, values: Mapping[str, float]) -> dict[str, float]:
    """Return only the requested numbers."""
    missing = [name for name in work.names[:_MOST_NUMBERS] if name not in values]
    if missing:
        has = ", ".join(values) or "none"
        raise ProtocolVersionError(
            f"question '{work.kind[:40]}' does not return the number '{missing[0][:40]}' on this "
            f"host; it returns: {has}; install the same release on the host and the coordinator",
        )
    return {name: values[name] for name in work.names[:_MOST_NUMBERS]}
