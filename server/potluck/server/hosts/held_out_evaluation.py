"""Evaluation on the clients' held-out samples, where the coordinator has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from potluck.common.errors import ProtocolError
from potluck.common.learning.scores import EvaluationCounts
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import evaluate_instruction, model_reference
from potluck.server.rounds.plan import RunPlan
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey

log = structlog.get_logger()


async def evaluate_on_clients(
    attendance: Attendance,
    plan: RunPlan,
    key: AttemptKey,
    model: ModelVersion,
    clients: Sequence[str],
    *,
    seconds: float,
    present: Callable[[str], bool],
) -> EvaluationCounts | None:
    """Summed counts of the clients, in the order given; None if no client holds any out.

    Counts add up exactly, so the metrics are those of all held-out samples together.
    """
    reference = model_reference(model)
    instructions = [
        evaluate_instruction(
            plan,
            # With the attempt: a run that is resumed may ask about another model.
            f"{key.run_id}/{key.round}.{key.attempt}/evaluate/{client}",
            key.run_id,
            key.round,
            client,
            reference,
        )
        for client in clients
    ]
    answers = await gather(attendance, instructions, seconds=seconds, present=present)
    task = plan.task
    total: EvaluationCounts | None = None
    for client in clients:
        answer = answers.get(client)
        if answer is None or answer.WhichOneof("outcome") != "evaluation":
            continue
        try:
            counts = EvaluationCounts.received(
                loss_sum=answer.evaluation.loss_sum,
                confusion=answer.evaluation.confusion,
                group_samples=answer.evaluation.group_samples,
                group_correct=answer.evaluation.group_correct,
                classes=task.classes,
                groups=task.groups,
            )
        except ProtocolError as error:
            log.warning("evaluation refused", client=client, why=error.message)
            continue
        total = counts if total is None else total + counts
    return total if total is not None and total.samples else None
