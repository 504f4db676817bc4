"""Each client receives the outcome of its own update at the end of a round."""

from __future__ import annotations

from datetime import UTC, datetime

from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.gather import announce_closed
from potluck.server.store.records import AttemptKey, MemberRow, MemberState, RoundRow


def member(client: str, state: MemberState) -> MemberRow:
    return MemberRow(
        client_id=client, host_id="h", state=state, reason="", trouble=None, update=None
    )


def test_settlement_of_a_committed_round_names_the_update_of_each_client() -> None:
    row = RoundRow(
        key=AttemptKey("r", 2, 1),
        model_blake3="0" * 64,
        state_blake3=None,
        selector_scalars={},
        strategy_scalars={},
        metrics={},
        seconds=1.0,
        bytes_down=0,
        bytes_up=0,
        committed_at=datetime(2026, 5, 4, 12, tzinfo=UTC),
        members=[member("a", MemberState.INCLUDED), member("b", MemberState.LATE)],
    )
    attendance = Attendance(lambda: 0.0)
    announce_closed(attendance, row)
    told = [attendance.pending(f"r/2.1/{client}/settle") for client in "ab"]
    assert [
        (each.instruction.settle.update_id, each.instruction.settle.included)
        for each in told
        if each
    ] == [("r/2.1/a", True), ("r/2.1/b", False)]
