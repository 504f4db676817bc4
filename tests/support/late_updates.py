"""A run in which the updates of two clients miss round 1's deadline and join round 2."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable

from support.federation import Federation, until

_HELD = ("train-client-4", "train-client-5")


def late_ones_stored(federation: Federation, run_id: str) -> int:
    """Return how many of the updates of clients 4 and 5 for round 1 the running coordinator has
    stored."""
    path = federation.state / "potluck.sqlite3"
    query = (
        "SELECT COUNT(*) FROM members WHERE run_id = ? AND round = 1 AND blake3 IS NOT NULL"
        " AND client_id IN ('client-4', 'client-5')"
    )
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        [(count,)] = database.execute(query, [run_id])
    return int(count)


async def run_with_late_ones(
    federation: Federation,
    meanwhile: Callable[[], Awaitable[None]],
    *,
    come: Callable[[str], Awaitable[None]] | None = None,
    deadline_seconds: float = 8.0,
) -> str:
    """Start a run of three rounds with all six clients of a federation; return its id.

    The updates of clients 4 and 5 miss round 1 and arrive while client 0 holds round 2. meanwhile:
    called in round 2, before these updates arrive. come: waits until they have arrived; by default
    in the database. deadline_seconds: duration of round 1; `meanwhile` must be faster.
    """
    points = federation.points
    points.clear()
    points.note_boundaries()
    points.hold(*_HELD, "evaluate")
    run_id = await federation.start_run(
        "clients_per_round=6",
        "rounds=3",
        f"round.deadline_seconds={deadline_seconds}",
        "round.quorum=0.5",
        "round.late_updates.rounds=2",
    )
    await until(lambda: points.reached("evaluate"), "evaluation of round 1")
    points.hold("train-client-0")
    points.release("evaluate")
    await federation.until_committed(run_id, 1)
    await meanwhile()
    points.release(*_HELD)
    if come is not None:
        await come(run_id)
    else:
        await until(lambda: late_ones_stored(federation, run_id) == 2, "late updates")
    points.release()
    return run_id
