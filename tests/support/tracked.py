"""Runs and rounds as passed to sinks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from potluck.common.learning.spread import Spread
from potluck.common.records.round import RoundMember
from potluck.server.sink import TrackedRound, TrackedRun

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TRACKED = TrackedRun(
    run_id="ab12",
    name="digits, twice",
    run_file='rounds = 4\n[task]\nname = "digits"\nclients = 6\n',
    task="digits",
    selector="uniform",
    strategy="fedavg",
    rounds=4,
    count=2,
    seed=7,
    created_at=AT,
    state="running",
    reason="",
    changed_at=AT,
)
SPREAD = Spread(clients=5, mean=0.75, quantiles={0.5: 0.75}, worst_tenth=0.5)
FINISHED = replace(TRACKED, state="finished", changed_at=AT + timedelta(seconds=9))


def tracked_round(number: int) -> TrackedRound:
    """Return a round with values derived from its number; every second round was evaluated."""
    measures = {"loss": 1 / number, "accuracy": 0.75} if number % 2 == 0 else {}
    return TrackedRound(
        number=number,
        measures=measures,
        spreads={"accuracy": SPREAD} if measures else {},
        members=tuple(
            RoundMember(
                client=client, host="h", state=state, reason="", trouble="", samples=0, seconds=1.0
            )
            for client, state in (("a", "included"), ("b", "lost"), ("c", "included"))
        ),
        seconds=0.1 + number,
        bytes_down=number * 10**10,
        bytes_up=3,
        model=f"{number}f" * 32,
        committed_at=AT + timedelta(seconds=number),
    )


ROUNDS = [tracked_round(number) for number in range(1, 5)]
