"""The instruction to check in advance whether a client can take part in a run.

Checks that a training could begin, and that the owner's policy allows the data that the run needs:
the update, answers to questions, counts on held-out samples."""

from __future__ import annotations

import asyncio

from potluck.client.disclosure.disclosure_policy import check_held_out, check_question
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.training_handler import permitted_weighting
from potluck.rpc.v1 import coordinator_pb2 as rpc


async def check(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer that all checks passed; otherwise raise the error that a training would raise."""
    instruction, work = active.instruction, active.instruction.check
    permitted_weighting(context.policy, instruction.client_id, work.train)
    if work.train.HasField("privacy"):
        await asyncio.to_thread(
            lambda: context.guard().check(instruction.client_id, work.train)
        )  # the first call imports a large library
    noisy = work.train.HasField("privacy")
    for kind in work.questions:
        check_question(context.policy, instruction.client_id, kind, noisy=noisy)
    if work.evaluates:
        check_held_out(context.policy, instruction.client_id, least_group=work.least_group)
    await context.compute(
        active, work.train.task, lambda device: device.check(work.train, work.layout)
    )
    if context.trainers is not context.worker:  # each process loads the task before a round begins
        context.trainers.prepare(lambda seat: seat.check(work.train, work.layout))
    return rpc.Answer(instruction_id=instruction.id, checked=rpc.Checked())
