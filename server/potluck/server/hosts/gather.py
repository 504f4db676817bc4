"""Sends messages to many hosts at once: instructions, whose answers it awaits, and
announcements."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from potluck.rpc.v1 import coordinator_pb2
from potluck.server.clock import now
from potluck.server.hosts.attendance import Attendance
from potluck.server.hosts.instructions import train_instruction_id
from potluck.server.store.records import AttemptKey, LateRow, MemberState, RoundRow

# Answers of many hosts ----------------------------------------------------------------------------

_PRESENCE_SECONDS = 0.5
"""Seconds between checks whether clients without an answer are still `present`."""


async def gather(
    attendance: Attendance,
    instructions: Sequence[coordinator_pb2.Instruction],
    *,
    seconds: float,
    present: Callable[[str], bool] = lambda _: True,
) -> dict[str, coordinator_pb2.Answer]:
    """Send instructions to hosts; return the answers by client.

    Wait at most `seconds`, and only for clients for which `present` returns True. A host that is
    briefly disconnected gets its instruction when it reconnects. Clients that do not answer in time
    are missing from the result.
    """
    answers: dict[str, coordinator_pb2.Answer] = {}
    changed = asyncio.Event()

    def take(client: str, answer: coordinator_pb2.Answer) -> None:
        answers.setdefault(client, answer)
        attendance.retire([answer.instruction_id])
        changed.set()

    for instruction in instructions:
        client = instruction.client_id
        attendance.instruct(
            instruction,
            deadline=time.monotonic() + seconds,
            on_answer=partial(take, client),
        )
    waiting = [instruction.client_id for instruction in instructions]
    try:
        async with asyncio.timeout(seconds):
            while waiting := [c for c in waiting if c not in answers and present(c)]:
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PRESENCE_SECONDS):
                        await changed.wait()
    except TimeoutError:
        pass
    finally:
        attendance.retire([instruction.id for instruction in instructions], abandon=True)
    return answers


# Announcements ------------------------------------------------------------------------------------

SETTLE_SECONDS: Final = 3600.0
"""Seconds for which `announce_closed`'s message is kept for a client whose host is disconnected."""


def announce_closed(attendance: Attendance, row: RoundRow, awaited: Collection[str] = ()) -> None:
    """Inform the cohort of a committed round which updates are part of the model.

    Also inform clients of earlier rounds whose late updates are part of this model. awaited:
    members of the cohort whose update may still join a later round; they are not informed yet.

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
