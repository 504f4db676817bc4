"""What left the clients of a run, as far as the coordinator saw it, for its operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from potluck.common.disclosure import parse_parameters
from potluck.common.errors import StorageError
from potluck.common.secagg import SessionRecord
from potluck.rpc.v1 import operator_pb2
from potluck.server.store import Profile, SecureSum, Store

_PROFILES_PER_MESSAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Disclosures:
    """sums: that clients of the run were asked for, oldest first, for whichever run. profiles: of
    its clients. independent: whether somebody else than the coordinator keeps the root."""

    sums: tuple[SessionRecord, ...]
    profiles: tuple[Profile, ...]
    independent: bool


def read_disclosures(store: Store, *, run_id: str, independent: bool) -> Disclosures:
    """Read them. Raises StorageError for a record that can't be understood."""
    roster = frozenset(store.roster(run_id))
    records = [_record(stored) for stored in store.sums()]
    return Disclosures(
        sums=tuple(each for each in records if not roster.isdisjoint(each.clients)),
        profiles=tuple(store.profiles(run_id=run_id)),
        independent=independent,
    )


def disclosure_messages(found: Disclosures) -> Iterator[operator_pb2.AuditDisclosuresResponse]:
    """One message for each sum, then the profiles, some in each; at least one message."""
    independent = found.independent
    for record in found.sums:
        yield operator_pb2.AuditDisclosuresResponse(
            sums=[_audited_sum(record)], independent_root=independent
        )
    for start in range(0, max(1, len(found.profiles)), _PROFILES_PER_MESSAGE):
        some = found.profiles[start : start + _PROFILES_PER_MESSAGE]
        yield operator_pb2.AuditDisclosuresResponse(
            profiles=[_audited_profile(each) for each in some], independent_root=independent
        )


def _record(stored: SecureSum) -> SessionRecord:
    try:
        return SessionRecord.model_validate(stored.record)
    except ValidationError as error:
        raise StorageError(
            f"the record of secure sum {stored.session_id} can't be read; restore the database"
        ) from error


def _audited_sum(record: SessionRecord) -> operator_pb2.AuditedSum:
    return operator_pb2.AuditedSum(
        session_id=record.session_id,
        run_id=record.run,
        disclosure=record.disclosure,
        subject=record.subject,
        released=record.outcome == "released",
        hosts=record.clients,
        least_hosts=record.least_hosts,
        colluding_hosts=record.colluding_hosts,
        quorum=record.quorum,
        epsilon=record.epsilon or 0.0,
        refusals=record.refusals,
        stage=record.stage,
        rule=record.rule,
        have=record.have,
        need=record.need,
        at=record.at.isoformat(),
        attempt=record.attempt,
        round=record.round,
    )


def _audited_profile(profile: Profile) -> operator_pb2.AuditedProfile:
    return operator_pb2.AuditedProfile(
        client_id=profile.client_id,
        signal=profile.signal,
        data_epoch=profile.data_epoch,
        epsilon=parse_parameters(profile.parameters_json).epsilon or 0.0,
        at=profile.received_at.isoformat(),
    )
