"""The announcement of a closed round, after which clients drop what they have of it."""

from __future__ import annotations

from typing import Final

from potluck.rpc.v1 import coordinator_pb2
from potluck.server.clock import now
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.store.records import MemberState, RoundRow

SETTLE_SECONDS: Final = 3600.0
"""Time for which the announcement waits for a client's host."""


def announce_closed(attendance: Attendance, row: RoundRow) -> None:
    """Tell the cohort of a committed round whose updates are part of the model.

    A client that hears of it again does nothing.
    """
    run_id, round_number, _ = row.key
    for member in row.members:
        update_id = train_instruction_id(*row.key, member.client_id)
        instruction = coordinator_pb2.Instruction(
            id=f"{update_id}/settle",
            client_id=member.client_id,
            run_id=run_id,
            round=round_number,
            settle=coordinator_pb2.Settle(
                included=member.state is MemberState.INCLUDED, update_id=update_id
            ),
        )
        attendance.instruct(instruction, deadline=now() + SETTLE_SECONDS, until_acknowledged=True)
