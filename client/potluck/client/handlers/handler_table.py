"""The table of handlers, one for each kind of instruction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.check_handler import check
from potluck.client.handlers.disclosure_handler import disclose
from potluck.client.handlers.evaluation_handler import evaluate_held_out
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.question_handler import answer_question
from potluck.client.handlers.training_handler import train
from potluck.common.errors import IdentityError, ProtocolVersionError
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc

Handler = Callable[[HandlerContext, ActiveInstruction], Awaitable[rpc.Answer | None]]
"""Returns the answer; None if an update was delivered instead. Raises PotluckError, and anything
that a plug-in raises."""


async def _step_of_sum(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Take the next step of a secure sum."""
    instruction, task = active.instruction, active.instruction.secure.task
    client = ClientId(instruction.client_id)

    async def count() -> list[int]:
        return await context.compute(active, task, lambda device: device.label_counts(task, client))

    reply = await context.sums.answer(instruction, count)
    return rpc.Answer(instruction_id=instruction.id, secure=reply)


async def _note_selection(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Take note of a document about a selection."""
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
            "this host's software does not know what the instruction asks for; update it"
        )
    return await handler(context, active)
