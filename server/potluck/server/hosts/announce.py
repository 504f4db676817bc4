"""Informs clients that a round is closed; they then delete their data of this round."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from potluck.rpc.v1 import coordinator_pb2
from potluck.server.clock import now
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.store.records import AttemptKey, LateRow, MemberState, RoundRow

SETTLE_SECONDS: Final = 3600.0
"""Seconds for which the message is kept for a client whose host is disconnected."""


def announce_closed(attendance: Attendance, row: RoundRow, awaited: Collection[str] = ()) -> None:
    """Inform the cohort of a committed round which updates are part of the model.

    Also inform clients of earlier rounds whose late updates are part of it. awaited: members of the
    cohort whose update may still join a later round; they are not informed yet.

    A client that receives the message twice ignores the second one.
    """
    for member in row.members:
        if member.client_id not in awaited:
            included = member.state is MemberState.INCLUDED
            _announce(attendance, row.key, member.client_id, included=included)
    for late in row.late:
        _announce(attendance, late.key, late.client_id, included=True)


def announce_dropped(attendance: Attendance, rows: Iterable[LateRow]) -> None:
    """Inform clients that their late updates will not be part of any model."""
    for row in rows:
        _announce(attendance, row.key, row.client_id, included=False)


def _announce(attendance: Attendance, key: AttemptKey, client: str, *, included: bool) -> None:
    update_id = train_instruction_id(*key, client)
    instruction = coordinator_pb2.Instruction(
        id=f"{update_id}/settle",
        client_id=client,
        run_id=key.run_id,
        round=key.round,
        settle=coordinator_pb2.Settle(included=included, update_id=update_id),
    )
    attendance.instruct(instruction, deadline=now() + SETTLE_SECONDS, until_acknowledged=True)
