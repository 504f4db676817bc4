"""Converts rounds to and from the messages of `WatchRun`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Final

from potluck.common.learning.spread import QUANTILES, Coverage, Spread
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.common.records.round import JoinedUpdate, Round, RoundMember
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState

OWN_FIELDS: Final = ("accuracy", "worst_group_accuracy", "weighted_f1", "loss")
"""The measures of classification tasks, which have separate fields in `Metrics`."""
_PREFIX = "MEMBER_STATE_"


def round_message(record: Round) -> operator_pb2.CommittedRound:
    """Return the message for a round."""
    message = operator_pb2.CommittedRound(
        round=record.number,
        members=[_member_message(member) for member in record.members],
        metrics=metrics_message(record.measures),
        seconds=record.seconds,
        bytes_down=record.bytes_down,
        bytes_up=record.bytes_up,
        model_blake3=record.model,
        sums=record.sums,
        late=[
            operator_pb2.LateUpdate(client_id=each.client, round=each.round, weight=each.weight)
            for each in record.late
        ],
        spreads={
            name: operator_pb2.Spread(
                clients=each.clients,
                mean=each.mean,
                quantiles=each.quantiles.values(),
                worst_tenth=each.worst_tenth,
                asked=each.asked,
                samples=each.samples,
                partial=each.partial,
            )
            for name, each in record.spreads.items()
        },
        coverage={name: coverage_message(each) for name, each in record.coverage.items()},
        software=record.software,
        privacy=None if record.privacy is None else _privacy_message(record.privacy),
    )
    if record.committed_at is not None:
        message.committed_at.FromDatetime(record.committed_at)
    return message


def round_of(message: operator_pb2.CommittedRound) -> Round:
    """Return the round in a message."""
    stored = message.HasField("committed_at")
    return Round(
        number=message.round,
        measures=_measures(message.metrics),
        spreads={name: _spread(each) for name, each in sorted(message.spreads.items())},
        members=tuple(member_of(member) for member in message.members),
        seconds=message.seconds,
        bytes_down=message.bytes_down,
        bytes_up=message.bytes_up,
        model=message.model_blake3,
        coverage={name: coverage_of(each) for name, each in sorted(message.coverage.items())},
        late=tuple(
            JoinedUpdate(client=each.client_id, round=each.round, weight=each.weight)
            for each in message.late
        ),
        sums=message.sums,
        committed_at=message.committed_at.ToDatetime(tzinfo=UTC) if stored else None,
        software=dict(sorted(message.software.items())),
        privacy=_privacy_of(message.privacy) if message.HasField("privacy") else None,
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


def _privacy_message(privacy: RoundPrivacy) -> operator_pb2.RoundPrivacy:
    return operator_pb2.RoundPrivacy(
        delta=privacy.delta,
        largest=privacy.largest,
        median=privacy.median,
        near_limit=privacy.near_limit,
        refused=privacy.refused,
        clients=privacy.clients,
    )


def _privacy_of(message: operator_pb2.RoundPrivacy) -> RoundPrivacy:
    return RoundPrivacy(
        delta=message.delta,
        largest=message.largest if message.HasField("largest") else None,
        median=message.median if message.HasField("median") else None,
        near_limit=message.near_limit if message.HasField("near_limit") else None,
        refused=message.refused,
        clients=dict(sorted(message.clients.items())),
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
