"""Records of evaluations that clients did not deliver, and a round's notice about them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from potluck.common.errors import DisclosureRefusedError
from potluck.common.learning.coverage import Coverage
from potluck.common.learning.measures import MeasuredModel
from potluck.common.monitoring.metric_labels import known_reason
from potluck.common.plain_text import plain

_LONGEST_MESSAGE = 160
_MOST_NAMED = 5
_MOST_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class MissingEvaluation:
    """A client that was asked to evaluate a model, and did not.

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
