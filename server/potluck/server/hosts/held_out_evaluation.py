"""Evaluation on the clients' held-out samples, where the coordinator has none of its own, or where
the spread over clients is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from potluck.common.errors import ProtocolError, TrainerError
from potluck.common.learning.measures import (
    CLASSIFICATION,
    MeasuredModel,
    MeasureSums,
    checked_measures,
)
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.spread import Spread, spreads
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


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What clients measured together. What one of them did is not in it.

    metrics: of all their samples together, by name; none if no client holds any out. spreads: by
    the measure's name; empty where they are not wanted, or too few clients measured.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)


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
    subject: MeasuredModel = MeasuredModel.ROUND,
) -> HeldOut:
    """Counts of the clients, summed in the order given, and how their measures are spread.

    Counts add up exactly, so the metrics are those of all held-out samples together. `kept` says
    which of the states that a client keeps goes with the model; `warn` is for what people should
    know of a task's own trainer, and of a spread that is not shown. `subject`: what clients make
    of the model before they measure; the names of measures say so.
    """
    reference = model_reference(model)
    instructions = [
        evaluate_instruction(
            plan,
            # With the attempt: a run that is resumed may ask about another model.
            f"{key.run_id}/{key.round}.{key.attempt}/{subject}evaluate/{client}",
            key.run_id,
            key.round,
            client,
            reference,
            kept(client),
            subject,
        )
        for client in clients
    ]
    answers = await gather(attendance, instructions, seconds=seconds, present=present)
    found: list[EvaluationCounts | MeasureSums] = []
    for client in clients:
        answer = answers.get(client)
        if answer is None:
            continue
        try:
            if plan.trainer is not None:
                found += _measures(plan, answer, client)
            elif answer.HasField("evaluation"):
                found.append(_counts(plan, answer.evaluation))
        except (ProtocolError, TrainerError) as error:
            log.warning("evaluation refused", client=client, why=error.message)
            if isinstance(error, TrainerError):
                warn(f"round {key.round} is not evaluated on {client}: {error.message}")
    found = [each for each in found if each.samples]
    total: Any = None
    for each in found:  # all of one kind
        total = each if total is None else total + each
    metrics = {} if total is None else total.means()
    return HeldOut(
        metrics={f"{subject}{name}": value for name, value in metrics.items()},
        spreads={
            f"{subject}{name}": each for name, each in _spreads(plan, key, found, warn).items()
        },
    )


def _spreads(
    plan: RunPlan,
    key: AttemptKey,
    found: Sequence[EvaluationCounts | MeasureSums],
    warn: Callable[[str], None],
) -> Mapping[str, Spread]:
    settings = plan.run_file.evaluation
    if not settings.spread:
        return {}
    if len(found) < settings.least_group:
        warn(
            f"no spread over clients is shown for round {key.round}: {len(found)} of them have "
            f"measured its model, and evaluation.least_group is {settings.least_group}"
        )
    return spreads(
        [each.means() for each in found],
        plan.measures or CLASSIFICATION,
        least_group=settings.least_group,
    )


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
