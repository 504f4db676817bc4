"""Converts rows of committed rounds into `Round`, the type that all programs use."""

from __future__ import annotations

from potluck.common.monitoring.metric_labels import SUM
from potluck.common.plain_text import plain
from potluck.common.records.round import INCLUDED, JoinedUpdate, Round, RoundMember
from potluck.server.store.records import MemberRow, MemberState, RoundRow

_LABEL = 40


def round_record(row: RoundRow) -> Round:
    """Return a row's round as a `Round`."""
    sums = {
        member.update.blake3
        for member in row.included
        if member.update is not None and member.update.encoding == SUM
    }
    return Round(
        number=row.key.round,
        measures=row.metrics,
        members=tuple(_member(member) for member in row.members),
        model=row.model_blake3,
        late=tuple(
            JoinedUpdate(client=each.client_id, round=each.round, weight=each.weight or 0.0)
            for each in row.late
        ),
        sums=len(sums),
        **row.facts(),
    )


def _member(row: MemberRow) -> RoundMember:
    update = row.update
    return RoundMember(
        client=row.client_id,
        host=row.host_id,
        state=INCLUDED if row.state is MemberState.RECEIVED else row.state.value,
        reason=row.reason,
        trouble=row.trouble or "",
        samples=update.samples if update else 0,
        seconds=update.seconds if update else 0.0,
        fraction=1.0 if update else 0.0,
        data_epoch=row.provenance.data_epoch,
        software=plain(row.provenance.software or "", _LABEL),
    )
