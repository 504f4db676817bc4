"""The instruction to check whether a training could begin, and whether what a run wants of a client
may leave: its update, its answers, its counts on held-out samples."""

from __future__ import annotations

import asyncio

from potluck.client.disclosure.disclosure_policy import check_held_out, check_question
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.training_handler import permitted_weighting
from potluck.rpc.v1 import coordinator_pb2 as rpc


async def check(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Say that it could. Raises what such a training would fail with."""
    instruction, work = active.instruction, active.instruction.check
    permitted_weighting(context.policy, instruction.client_id, work.train)
    if work.train.HasField("privacy"):
        await asyncio.to_thread(
            lambda: context.guard().check(instruction.client_id, work.train)
        )  # the first time, its library is imported
    for kind in work.questions:
        check_question(context.policy, instruction.client_id, kind)
    if work.evaluates:
        check_held_out(context.policy, instruction.client_id, least_group=work.least_group)
    await context.compute(
        active, work.train.task, lambda device: device.check(work.train, work.layout)
    )
    if context.trainers is not context.worker:  # each process loads the task before a round begins
        context.trainers.prepare(lambda seat: seat.check(work.train, work.layout))
    return rpc.Answer(instruction_id=instruction.id, checked=rpc.Checked())
