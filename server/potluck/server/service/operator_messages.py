"""Creates the messages to operators about profiles and audits."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import parse_parameters
from potluck.rpc.v1 import operator_pb2
from potluck.server.aggregation.audit.label_audit import ClientAudit, Contradiction, LabelVerdict
from potluck.server.selection import Population
from potluck.server.service.archive import Disclosures, SumRecord
from potluck.server.store import Profile

_ENTRIES_PER_MESSAGE = 100_000
_AUDITS_PER_MESSAGE = 1000
_PROFILES_PER_MESSAGE = 1000
_VERDICTS: Mapping[LabelVerdict, operator_pb2.LabelVerdict.ValueType] = {
    LabelVerdict.CONSISTENT: operator_pb2.LABEL_VERDICT_CONSISTENT,
    LabelVerdict.SUSPICIOUS: operator_pb2.LABEL_VERDICT_SUSPICIOUS,
    LabelVerdict.UNKNOWN: operator_pb2.LABEL_VERDICT_UNKNOWN,
}


def profile_messages(population: Population) -> Iterator[operator_pb2.FetchProfilesResponse]:
    """Yield messages with the clients in roster order, several per message; one message if there
    are none."""
    per_message = max(1, _ENTRIES_PER_MESSAGE // (3 * population.classes + 3))
    for start in range(0, max(1, len(population)), per_message):
        rows = range(start, min(start + per_message, len(population)))
        yield operator_pb2.FetchProfilesResponse(
            classes=population.classes, clients=[_client(population, row) for row in rows]
        )


def _client(population: Population, row: int) -> operator_pb2.ClientProfile:
    return operator_pb2.ClientProfile(
        client_id=population.ids[row],
        samples=int(population.samples[row]),
        label_counts=_entries(population.label_counts, row),
        triplet=_entries(population.triplets, row),
        interaction_matrix=_entries(population.interaction_matrices, row),
    )


def _entries(column: NDArray[np.float64] | None, row: int) -> list[float]:
    if column is None or np.isnan(column[row]).any():
        return []
    entries: list[float] = column[row].ravel().tolist()
    return entries


def audit_messages(
    population: Population, audits: Sequence[ClientAudit]
) -> Iterator[operator_pb2.AuditLabelsResponse]:
    """Yield messages with the audits in roster order, several per message; one message if there are
    none."""
    for start in range(0, max(1, len(audits)), _AUDITS_PER_MESSAGE):
        some = audits[start : start + _AUDITS_PER_MESSAGE]
        yield operator_pb2.AuditLabelsResponse(
            audits=[_audit(population.ids[audit.row], audit) for audit in some]
        )


def _audit(client: str, audit: ClientAudit) -> operator_pb2.LabelAudit:
    return operator_pb2.LabelAudit(
        client_id=client,
        verdict=_VERDICTS[audit.verdict],
        rounds=audit.rounds,
        suspicions=[
            operator_pb2.LabelSuspicion(
                label=each.label,
                hidden=each.contradiction is Contradiction.HIDDEN,
                claimed=each.claimed,
                bound=each.bound,
                rises=each.rises,
                probability=each.probability,
            )
            for each in audit.suspicions
        ],
    )


def disclosure_messages(found: Disclosures) -> Iterator[operator_pb2.AuditDisclosuresResponse]:
    """Yield one message for each sum, then messages with several profiles each; at least one
    message."""
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


def _audited_sum(record: SumRecord) -> operator_pb2.AuditedSum:
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
        convicted=record.convicted,
        verdict=base64.b64decode(record.verdict),
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
