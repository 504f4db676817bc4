"""Finds updates that were in the spool when the coordinator ended. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from potluck.common.errors import LayoutError, StorageError
from potluck.common.monitoring.metric_labels import SUM
from potluck.common.tensors.tensor_files import file_digest
from potluck.common.updates.lane_files import opened_lanes
from potluck.common.updates.lanes import members_digest
from potluck.server.aggregation.spool import Spool
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.store.records import AttemptKey, MemberRow, MemberState, UpdateRow


def still_spooled(
    spool: Spool,
    key: AttemptKey,
    members: Iterable[MemberRow],
    update_id: Callable[[str], str],
    *,
    missed: bool = False,
) -> Mapping[str, SpooledUpdate]:
    """Return, by client, the received updates whose files are still intact after a restart.

    A crash of the machine may damage files. A sum is only returned if all its members are among
    `members`: a client may have left the cohort after the sum was stored.

    update_id: function that returns the id of a client's update in the attempt. missed: True to
    include updates that missed the round.
    """
    states = {MemberState.RECEIVED}
    if missed:
        states |= {MemberState.LATE, MemberState.SPARED}
    sums: dict[str, dict[str, UpdateRow]] = {}
    found: dict[str, SpooledUpdate] = {}
    for member in members:
        client, row = member.client_id, member.update
        if member.state not in states or row is None:
            continue
        if row.encoding == SUM:
            sums.setdefault(row.blake3, {})[client] = row
            continue
        path = spool.path(key.round, key.attempt, client, row.blake3)
        if intact(path, row.blake3):
            found[client] = SpooledUpdate(
                client=client, path=path, row=row, dropped=member.work.dropped
            )
    for blake3, rows in sums.items():
        file = spool.find(key.round, key.attempt, blake3)
        ids = [update_id(client) for client in rows]
        if file is not None and intact(file, blake3) and _holds(file, ids):
            for client, row in rows.items():
                found[client] = SpooledUpdate(client=client, path=file, row=row)
    return found


def intact(path: Path, blake3: str) -> bool:
    """Return True if a spooled file still has the digest that was verified at its upload."""
    try:
        return file_digest(path).blake3 == blake3
    except StorageError:
        return False


def _holds(path: Path, update_ids: Sequence[str]) -> bool:
    try:
        with opened_lanes(path) as file:
            return file.members == members_digest(update_ids)
    except (LayoutError, StorageError):
        return False
