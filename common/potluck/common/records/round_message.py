"""Converts rounds to and from the messages of `WatchRun`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

from potluck.common.learning.spread import QUANTILES, Coverage, Spread
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.records.round import JoinedUpdate, Round, RoundFacts, RoundMember
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState

OWN_FIELDS: Final = ("accuracy", "worst_group_accuracy", "weighted_f1", "loss")
"""The measures of classification tasks, which have separate fields in `Metrics`."""
_PREFIX = "MEMBER_STATE_"


def round_message(record: Round) -> operator_pb2.CommittedRound:
    """Return the message for a round."""
    return operator_pb2.CommittedRound(
        round=record.number,
        members=[_member_message(member) for member in record.members],
        metrics=metrics_message(record.measures),
        model_blake3=record.model,
        sums=record.sums,
        late=[
            operator_pb2.LateUpdate(client_id=each.client, round=each.round, weight=each.weight)
            for each in record.late
        ],
        **{
            name: _TO_MESSAGE[name](value) if name in _TO_MESSAGE else value
            for name, value in record.facts().items()
            if value is not None
        },
    )


def round_of(message: operator_pb2.CommittedRound) -> Round:
    """Return the round in a message."""
    return Round(
        number=message.round,
        measures=_measures(message.metrics),
        members=tuple(member_of(member) for member in message.members),
        model=message.model_blake3,
        late=tuple(
            JoinedUpdate(client=each.client_id, round=each.round, weight=each.weight)
            for each in message.late
        ),
        sums=message.sums,
        **{
            name: _FROM_MESSAGE[name](message) if name in _FROM_MESSAGE else getattr(message, name)
            for name in RoundFacts.names()
        },
    )


def metrics_message(measures: Mapping[str, float]) -> operator_pb2.Metrics:
    """Return the message for a model's measures."""
    own = {name: measures[name] for name in OWN_FIELDS if name in measures}
    others = {name: value for name, value in measures.items() if name not in own}
    return operator_pb2.Metrics(**own, others=others)


def coverage_message(coverage: Coverage) -> operator_pb2.Coverage:
    """Return the message for the numbers of clients and samples behind a measure."""
    return operator_pb2.Coverage(
        clients=coverage.clients,
        asked=coverage.asked,
        samples=coverage.samples,
        partial=coverage.partial,
    )


def coverage_of(message: operator_pb2.Coverage) -> Coverage:
    """Return the numbers of clients and samples in a message."""
    return Coverage(
        clients=message.clients,
        asked=message.asked,
        samples=message.samples,
        partial=message.partial,
    )


def member_of(message: operator_pb2.Member) -> RoundMember:
    """Return the member that a message describes; its round is committed or current."""
    return RoundMember(
        client=message.client_id,
        host=message.host_id,
        state=member_state_name(message.state),
        reason=message.reason,
        trouble=message.trouble,
        samples=message.samples,
        seconds=message.seconds,
        fraction=message.fraction,
        data_epoch=message.data_epoch if message.HasField("data_epoch") else None,
        software=message.software_version,
    )


def member_state_name(state: MemberState.ValueType) -> str:
    """Return a member's state in one lower-case word."""
    return MemberState.Name(state).removeprefix(_PREFIX).lower()


def _member_message(member: RoundMember) -> operator_pb2.Member:
    return operator_pb2.Member(
        client_id=member.client,
        host_id=member.host,
        state=MemberState.Value(f"{_PREFIX}{member.state.upper()}"),
        reason=member.reason,
        trouble=member.trouble,
        samples=member.samples,
        seconds=member.seconds,
        fraction=member.fraction,
        data_epoch=member.data_epoch,
        software_version=member.software,
    )


def _spreads_message(spreads: Mapping[str, Spread]) -> dict[str, operator_pb2.Spread]:
    return {
        name: operator_pb2.Spread(
            clients=each.clients,
            mean=each.mean,
            quantiles=each.quantiles.values(),
            worst_tenth=each.worst_tenth,
            asked=each.asked,
            samples=each.samples,
            partial=each.partial,
        )
        for name, each in spreads.items()
    }


def _spreads_of(message: operator_pb2.CommittedRound) -> dict[str, Spread]:
    return {name: _spread(each) for name, each in sorted(message.spreads.items())}


def _coverages_message(coverage: Mapping[str, Coverage]) -> dict[str, operator_pb2.Coverage]:
    return {name: coverage_message(each) for name, each in coverage.items()}


def _coverages_of(message: operator_pb2.CommittedRound) -> dict[str, Coverage]:
    return {name: coverage_of(each) for name, each in sorted(message.coverage.items())}


def _time_message(at: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(at)
    return message


def _time_of(message: operator_pb2.CommittedRound) -> datetime | None:
    stored = message.HasField("committed_at")
    return message.committed_at.ToDatetime(tzinfo=UTC) if stored else None


def _software_of(message: operator_pb2.CommittedRound) -> dict[str, str]:
    return dict(sorted(message.software.items()))


def _privacy_message(privacy: RoundPrivacy) -> operator_pb2.RoundPrivacy:
    return operator_pb2.RoundPrivacy(
        delta=privacy.delta,
        largest=privacy.largest,
        median=privacy.median,
        near_limit=privacy.near_limit,
        refused=privacy.refused,
        clients=privacy.clients,
    )


def _privacy_of(message: operator_pb2.CommittedRound) -> RoundPrivacy | None:
    if not message.HasField("privacy"):
        return None
    found = message.privacy
    return RoundPrivacy(
        delta=found.delta,
        largest=found.largest if found.HasField("largest") else None,
        median=found.median if found.HasField("median") else None,
        near_limit=found.near_limit if found.HasField("near_limit") else None,
        refused=found.refused,
        clients=dict(sorted(found.clients.items())),
    )


def _measures(message: operator_pb2.Metrics) -> dict[str, float]:
    own = [name for name in OWN_FIELDS if message.HasField(name)]
    found = {name: float(getattr(message, name)) for name in own}
    return found | dict(sorted(message.others.items()))


def _spread(message: operator_pb2.Spread) -> Spread:
    return Spread(
        clients=message.clients,
        mean=message.mean,
        quantiles=dict(zip(QUANTILES, message.quantiles, strict=False)),
        worst_tenth=message.worst_tenth,
        asked=max(message.asked, message.clients),
        samples=message.samples,
        partial=message.partial,
    )


_TO_MESSAGE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "spreads": _spreads_message,
    "coverage": _coverages_message,
    "committed_at": _time_message,
    "privacy": _privacy_message,
}
"""Functions that convert those `RoundFacts` that are not plain values. Each fact has a field of the
same name in the message."""
_FROM_MESSAGE: Final[Mapping[str, Callable[[operator_pb2.CommittedRound], Any]]] = {
    "spreads": _spreads_of,
    "coverage": _coverages_of,
    "committed_at": _time_of,
    "software": _software_of,
    "privacy": _privacy_of,
}
"""Functions that read those `RoundFacts` that are not plain values, or may be absent."""
