"""The table of handlers, one for each kind of instruction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.check_handler import check
from potluck.client.handlers.disclosure_handler import disclose
from potluck.client.handlers.evaluation_handler import evaluate_held_out
from potluck.client.handlers.handler_context import HandlerContext
from potluck.client.handlers.question_handler import answer_question
from potluck.client.handlers.sum_handler import step_of_sum
from potluck.client.handlers.training_handler import train
from potluck.common.errors import IdentityError, ProtocolVersionError
from potluck.rpc.v1 import coordinator_pb2 as rpc

Handler = Callable[[HandlerContext, ActiveInstruction], Awaitable[rpc.Answer | None]]
"""Returns the answer; None if an update was delivered instead. Raises PotluckError, and anything
that a plug-in raises."""

HANDLERS: Mapping[str, Handler] = {
    "train": train,
    "check": check,
    "evaluate": evaluate_held_out,
    "disclose": disclose,
    "question": answer_question,
    "secure": step_of_sum,
}
"""The handlers, by the name of the instruction's field that holds the work."""


async def carry_out(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer | None:
    """Carry out an instruction, as `Handler` says."""
    client = active.instruction.client_id
    if client not in context.clients:
        raise IdentityError(f"client '{client}' is not on this host", client=client)
    handler = HANDLERS.get(active.instruction.WhichOneof("work") or "")
    if handler is None:
        raise ProtocolVersionError(
            "this host's software does not know what the instruction asks for; update it"
        )
    return await handler(context, active)
