"""The instruction to evaluate a model on a client's held-out samples."""

from __future__ import annotations

from potluck.client.disclosure.disclosure_policy import check_held_out
from potluck.client.disclosure.outgoing_log import Outgoing
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc


async def evaluate_held_out(context: HandlerContext, active: ActiveInstruction) -> rpc.Answer:
    """Answer with counts, where the owner's policy allows that."""
    instruction, work = active.instruction, active.instruction.evaluate
    client = ClientId(instruction.client_id)
    check_held_out(context.policy, client)
    async with context.model(active, work.model, work.task) as model:
        counts = await context.compute(
            active,
            work.task,
            lambda device: device.evaluate(work, client_id=client, model=model),
        )
    by_class = counts.confusion.sum(axis=1)
    context.outgoing.note(
        instruction,
        Outgoing.HELD_OUT,
        model=work.model.blake3,
        task=work.task.name,
        samples=int(by_class.sum()),
        correct=int(counts.confusion.trace()),
        loss_sum=counts.loss_sum,
        by_class=by_class.tolist(),
    )
    evaluation = rpc.EvaluationCounts(
        loss_sum=counts.loss_sum,
        confusion=counts.confusion.reshape(-1).tolist(),
        group_samples=counts.group_samples.tolist(),
        group_correct=counts.group_correct.tolist(),
    )
    return rpc.Answer(instruction_id=instruction.id, evaluation=evaluation)
