"""Sends instructions to many hosts at once, and waits for their answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from potluck.rpc.v1 import coordinator_pb2
from potluck.server.hosts.attendance import Attendance

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

    Wait at most `seconds` for every client that is `present`. A host that is briefly disconnected
    gets its instruction when it reconnects. Clients that do not answer in time are missing from the
    result.
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
