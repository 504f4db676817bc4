"""Evaluates models on the clients' held-out samples.

Used if the coordinator has no evaluation data, or to show the spread of metrics over clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from potluck.common.errors import (
    DisclosureRefusedError,
    NothingHeldOutError,
    ProtocolError,
    TrainerError,
)
from potluck.common.learning.measures import (
    CLASSIFICATION,
    WORST_GROUP,
    MeasuredModel,
    MeasureSums,
    checked_measures,
)
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.learning.spread import Coverage, Spread, coverages, spreads
from potluck.common.monitoring.metric_labels import known_reason
from potluck.common.plain_text import plain
from potluck.common.updates.update_report import measured
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import gather
from potluck.server.hosts.instructions import evaluate_instruction, model_reference
from potluck.server.plan.plan import RunPlan
from potluck.server.store.model_files import ModelVersion
from potluck.server.store.records import AttemptKey

# Missing evaluations ------------------------------------------------------------------------------
# These functions are pure.

_LONGEST_MESSAGE = 160
_MOST_NAMED = 5
_MOST_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class MissingEvaluation:
    """A client that was asked to evaluate a model, but sent no usable result.

    why: a short text, the same for all clients with the same problem. message: the client's own
    error; empty if it sent none.
    """

    client: str
    why: str
    message: str = ""


def failed(client: str, reason: str, message: str) -> MissingEvaluation:
    """Return the record of a client that answered with a failure. reason, message: as the client
    sent them."""
    kind = "refused" if reason == DisclosureRefusedError.reason else "failed"
    return MissingEvaluation(
        client=client,
        why=f"{kind} with {known_reason(reason)}",
        message=plain(message, _LONGEST_MESSAGE),
    )


def malformed(client: str, message: str) -> MissingEvaluation:
    """Return the record of a client whose numbers can't be the result of an evaluation."""
    return MissingEvaluation(
        client=client, why="sent invalid numbers", message=plain(message, _LONGEST_MESSAGE)
    )


def silent(client: str, *, present: bool, seconds: float) -> MissingEvaluation:
    """Return the record of a client that sent no answer. present: True if its host is connected."""
    why = f"did not answer within {seconds:g} s" if present else "disconnected"
    return MissingEvaluation(client=client, why=why)


def notice(
    round_number: int,
    subject: MeasuredModel,
    missing: Sequence[MissingEvaluation],
    coverage: Mapping[str, Coverage],
) -> str:
    """Return one line about the missing evaluations of one model in a round.

    missing: at least one record. coverage: numbers of clients and samples for all metrics of that
    model.
    """
    widest = max(coverage.values(), key=lambda each: (each.clients, each.samples))
    metrics = f"the {subject or 'model'} metrics".replace("_ ", " ")
    over = f"are over {widest.clients} of {widest.asked} clients ({widest.samples} samples)"
    if not widest.clients:
        over = f"are missing: none of {widest.asked} clients measured them"
    partial = any(each.partial for each in coverage.values())
    remark = "; partial: they count neither for the best model nor for [stop]" if partial else ""
    return f"round {round_number}: {metrics} {over}: {_groups(missing)}{remark}"


def _groups(missing: Sequence[MissingEvaluation]) -> str:
    by_reason: dict[str, list[MissingEvaluation]] = {}
    for each in missing:
        by_reason.setdefault(each.why, []).append(each)
    groups = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    parts = [_group(why, group) for why, group in groups[:_MOST_GROUPS]]
    rest = sum(len(group) for _, group in groups[_MOST_GROUPS:])
    if rest:
        parts.append(f"{rest} for other reasons")
    return "; ".join(parts)


def _group(why: str, group: Sequence[MissingEvaluation]) -> str:
    names = ", ".join(each.client for each in group[:_MOST_NAMED])
    more = len(group) - _MOST_NAMED
    if more > 0:
        names += f" and {more} more"
    message = group[0].message
    example = "for example: " if message and len(group) > 1 else ""
    return f"{len(group)} {why} ({names}{f'; {example}{message}' if message else ''})"


# The evaluation -----------------------------------------------------------------------------------

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Metrics over many clients, without the values of single clients.

    metrics: value of each metric over all held-out samples; empty if no client has any samples.
    spreads: spread of each metric over clients; empty if not requested, or if too few clients
    evaluated. coverage: numbers of clients and samples from which each metric is computed, also for
    metrics that no client could compute.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    coverage: Mapping[str, Coverage] = field(default_factory=dict)


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
    """Evaluate a model on the clients' held-out samples and return the combined metrics.

    Clients' counts are summed in the given order. Sums are exact, so the metrics are those of all
    held-out samples together. kept: function that returns the reference to a client's stored state
    for the model. warn: function called with one line about clients that did not answer, and one
    about a spread that is not shown. subject: the model to evaluate: this one, or one that clients
    derive from it; it is part of the metrics' names.
    """
    reference = model_reference(model)
    instructions = [
        evaluate_instruction(
            plan,
            # The id contains the attempt, because a resumed run may evaluate a different model.
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
    missing: list[MissingEvaluation] = []
    for client in clients:
        each = _answered(plan, answers.get(client), client, present=present, seconds=seconds)
        if isinstance(each, MissingEvaluation):
            missing.append(each)
            log.info("evaluation missing", client=client, why=each.why, message=each.message)
        elif each is not None and each.samples:
            found.append(each)
    coverage = coverages(
        [each.counted for each in found],
        _names(plan),
        missing=len(missing),
        least_share=plan.run_file.evaluation.least_share,
    )
    if missing:
        warn(notice(key.round, subject, missing, coverage))
    total: Any = None
    for each in found:  # all of one type: EvaluationCounts or MeasureSums
        total = each if total is None else total + each
    metrics = {} if total is None else total.means()
    spreads_of = _spreads(plan, key, found, warn)
    return HeldOut(
        metrics={f"{subject}{name}": value for name, value in metrics.items()},
        spreads={
            f"{subject}{name}": replace(
                each,
                asked=coverage[name].asked,
                samples=coverage[name].samples,
                partial=coverage[name].partial,
            )
            for name, each in spreads_of.items()
        },
        coverage={f"{subject}{name}": each for name, each in coverage.items()},
    )


def _names(plan: RunPlan) -> Sequence[str]:
    """Return the names of the metrics that clients are asked to compute."""
    if plan.trainer is not None:
        return list(plan.measures)
    return [name for name in CLASSIFICATION if plan.task.groups or name != WORST_GROUP]


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
            f"no spread over clients is shown for round {key.round}: only {len(found)} clients "
            f"have measured the model, but evaluation.least_group is {settings.least_group}"
        )
    means = [each.means() for each in found]
    finite = {
        name: measure
        for name, measure in (plan.measures or CLASSIFICATION).items()
        if all(
            name in each or not of.counted.get(name) for each, of in zip(means, found, strict=True)
        )
    }
    return spreads(means, finite, least_group=settings.least_group)


def _answered(
    plan: RunPlan,
    answer: coordinator_pb2.Answer | None,
    client: str,
    *,
    present: Callable[[str], bool],
    seconds: float,
) -> EvaluationCounts | MeasureSums | MissingEvaluation | None:
    """Return a client's counts, or why they are missing; None if the client has no held-out
    samples."""
    if answer is None:
        return silent(client, present=present(client), seconds=seconds)
    if answer.HasField("failure"):
        reason = answer.failure.reason
        if reason == NothingHeldOutError.reason:
            return None
        return failed(client, reason, answer.failure.message)
    try:
        if plan.trainer is None and answer.HasField("evaluation"):
            return _counts(plan, answer.evaluation)
        if plan.trainer is not None and answer.HasField("measures"):
            return _measures(plan, answer.measures, client)
    except (ProtocolError, TrainerError) as error:
        return malformed(client, error.message)
    return malformed(client, "the answer is not the result of an evaluation")


def _measures(plan: RunPlan, measures: coordinator_pb2.MeasuredSums, client: str) -> MeasureSums:
    """Return the sums computed by a client's trainer. Raises TrainerError if they are not valid."""
    found = checked_measures(
        measured(measures.sums), plan.measures, f"the evaluation of client '{client}'"
    )
    return MeasureSums(measures=found)


def _counts(plan: RunPlan, evaluation: coordinator_pb2.EvaluationCounts) -> EvaluationCounts:
    """Return the counts of a client's evaluation. Raises ProtocolError if they are impossible."""
    return EvaluationCounts.received(
        loss_sum=evaluation.loss_sum,
        confusion=evaluation.confusion,
        group_samples=evaluation.group_samples,
        group_correct=evaluation.group_correct,
        classes=plan.task.classes,
        groups=plan.task.groups,
    )
