"""Evaluation on the clients' held-out samples, where the coordinator has none of its own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import structlog

from potluck.common.errors import ProtocolError, TrainerError
from potluck.common.learning.measures import MeasureSums, added_up, checked_measures
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.plain_text import plain
from potluck.common.updates.update_report import measured
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import evaluate_instruction, model_reference
from potluck.server.rounds.plan import RunPlan
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey

log = structlog.get_logger()

_TROUBLE = 400


async def evaluate_on_clients(
    attendance: Attendance,
    plan: RunPlan,
    key: AttemptKey,
    model: ModelVersion,
    clients: Sequence[str],
    *,
    seconds: float,
    present: Callable[[str], bool],
    kept: Callable[[str], coordinator_pb2.KeptState | None],
    warn: Callable[[str], None],
) -> EvaluationCounts | MeasureSums | None:
    """Summed counts of the clients, in the order given; None if no client holds any out.

    Counts add up exactly, so the metrics are those of all held-out samples together. `kept` says
    which of the states that a client keeps goes with the model; `warn` is for what people should
    know of a task's own trainer.
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
            kept(client),
        )
        for client in clients
    ]
    answers = await gather(attendance, instructions, seconds=seconds, present=present)
    found: list[EvaluationCounts] = []
    measures: list[MeasureSums] = []
    for client in clients:
        answer = answers.get(client)
        if answer is None:
            continue
        try:
            if plan.trainer is not None:
                measures += _measures(plan, answer, client)
            elif answer.HasField("evaluation"):
                found.append(_counts(plan, answer.evaluation))
        except (ProtocolError, TrainerError) as error:
            log.warning("evaluation refused", client=client, why=error.message)
            if isinstance(error, TrainerError):
                warn(f"round {key.round} is not evaluated on {client}: {error.message}")
    total: EvaluationCounts | MeasureSums = added_up(measures)
    if found:
        total = functools.reduce(operator.add, found)
    return total if total.samples else None


def _measures(plan: RunPlan, answer: coordinator_pb2.Answer, client: str) -> Sequence[MeasureSums]:
    """What a client's trainer measured; nothing where the client measures nothing. Raises
    TrainerError where it failed, or for what it may not say."""
    if answer.failure.reason == TrainerError.reason:
        raise TrainerError(plain(answer.failure.message, _TROUBLE))
    if not answer.HasField("measures"):
        return ()
    found = checked_measures(
        measured(answer.measures.sums), plan.measures, f"what '{client}' measured"
    )
    return (MeasureSums(measures=found),)


def _counts(plan: RunPlan, evaluation: coordinator_pb2.EvaluationCounts) -> EvaluationCounts:
    """Raises ProtocolError for counts that no evaluation gives."""
    return EvaluationCounts.received(
        loss_sum=evaluation.loss_sum,
        confusion=evaluation.confusion,
        group_samples=evaluation.group_samples,
        group_correct=evaluation.group_correct,
        classes=plan.task.classes,
        groups=plan.task.groups,
    )
