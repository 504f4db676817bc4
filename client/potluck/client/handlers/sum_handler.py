"""The instruction to take the next step of a secure sum."""

from __future__ import annotations

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc


async def step_of_sum(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer a message of the coordinator's; a refusal is an answer, too."""
    instruction, task = active.instruction, active.instruction.secure.task
    client = ClientId(instruction.client_id)

    async def count() -> list[int]:
        return await context.compute(active, task, lambda device: device.label_counts(task, client))

    reply = await context.sums.answer(instruction, count)
    return rpc.Answer(instruction_id=instruction.id, secure=reply)
