"""What a run's clients have disclosed, and what is to be thought of it, as operators fetch it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.rpc.v1 import operator_pb2
from potluck.server.aggregation.label_audit import ClientAudit, Contradiction, LabelVerdict
from potluck.server.selection import Population

_ENTRIES_PER_MESSAGE = 100_000
_AUDITS_PER_MESSAGE = 1000
_VERDICTS: Mapping[LabelVerdict, operator_pb2.LabelVerdict.ValueType] = {
    LabelVerdict.CONSISTENT: operator_pb2.LABEL_VERDICT_CONSISTENT,
    LabelVerdict.SUSPICIOUS: operator_pb2.LABEL_VERDICT_SUSPICIOUS,
    LabelVerdict.UNKNOWN: operator_pb2.LABEL_VERDICT_UNKNOWN,
}


def profile_messages(population: Population) -> Iterator[operator_pb2.FetchProfilesResponse]:
    """The clients in roster order, some in each message; one message where there are none."""
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
    """The audits in roster order, some in each message; one message where there are none."""
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
