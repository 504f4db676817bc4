"""The instruction to evaluate a model on a client's held-out samples."""

from __future__ import annotations

from potluck.client.disclosure.disclosure_policy import check_held_out, check_tuning
from potluck.client.disclosure.outgoing_log import Outgoing
from potluck.client.handlers.active_instruction import ActiveInstruction
from potluck.client.handlers.handler_context import HandlerContext
from potluck.common.learning.measures import MeasureSums
from potluck.common.names import ClientId
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


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
