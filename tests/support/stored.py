"""Records to put into a store."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import create_engine, delete, insert

from potluck.common.learning.spread import Coverage, spread
from potluck.server.store import (
    AttemptKey,
    ClientSeen,
    MemberState,
    NewRun,
    RoundCommit,
    Store,
    UpdateRow,
)
from potluck.server.store.sql import schema

AT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
RUN = NewRun(
    run_id="ab12",
    name="digits",
    run_file="rounds = 3\n",
    created_at=AT,
    rounds=3,
    count=2,
    seed=7,
    task="digits",
    selector="uniform",
    strategy="fedavg",
)
UPDATE = UpdateRow(
    blake3="e" * 64,
    size=1234,
    encoding="int8",
    delta=True,
    compressed=False,
    samples=57,
    steps=8,
    seconds=1.25,
    loss=0.5,
    normalizer=13.1441,
    reports={"utility": 6.48074},
)
COHORT = [("a", "h1", "because"), ("b", "h1", "complement of a"), ("c", "h2", "entropy")]


_STORED_UPDATE = {
    "blake3": UPDATE.blake3,
    "size": UPDATE.size,
    "encoding": UPDATE.encoding,
    "delta": 1,
    "compressed": 0,
    "samples": UPDATE.samples,
    "steps": UPDATE.steps,
    "seconds": UPDATE.seconds,
}


_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a SQLite database from another process while the block runs."""
    command = [sys.executable, "-c", _LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            process.kill()


def see_client(store: Store, client_id: str = "a", host_id: str = "h") -> None:
    """Store a client as seen."""
    store.see_clients([ClientSeen(client_id=client_id, host_id=host_id, device="cpu", at=AT)])


def digest(number: int) -> str:
    """Return a made-up BLAKE3 digest, different for each number."""
    return f"{number:064x}"


def begun_run(store: Store, run_id: str = RUN.run_id) -> None:
    """Store a run that is ready for round 1."""
    store.add_run(replace(RUN, run_id=run_id))
    store.append_to_roster(run_id, ["a", "b", "c"])
    store.set_initial_model(run_id, digest(0), AT)


def commit(key: AttemptKey, included: Sequence[str]) -> RoundCommit:
    """Return a commit whose fields are derived from the round."""
    return RoundCommit(
        key=key,
        model_blake3=digest(key.round),
        state_blake3=digest(1000 + key.round),
        selector_scalars={"turn": key.round, "share": 1 / 3, "done": False, "none": None},
        strategy_scalars={"name": "fedavg", "limit": float("inf")},
        metrics={"loss": 2.0**-key.round, "accuracy": 0.75, "weighted_f1": 0.5},
        spreads={"loss": spread([0.1, 2.0**-key.round, 7.0], higher_is_better=False)},
        coverage={"loss": Coverage(clients=2, asked=3, samples=40, partial=True)},
        seconds=2.5,
        bytes_down=key.round * 10**10,
        bytes_up=3,
        committed_at=AT + timedelta(seconds=key.round),
        included=included,
    )


def selected(store: Store, key: AttemptKey) -> None:
    """Store an attempt with the cohort `COHORT`."""
    store.begin_attempt(key, [0, 1, 2], AT)
    store.set_cohort(key, COHORT)


def committed(store: Store, key: AttemptKey) -> None:
    """Store a round that includes a and c; b has sent no update."""
    selected(store, key)
    for client_id in ("a", "c"):
        store.set_member(key, client_id, MemberState.RECEIVED, update=UPDATE)
    store.commit_round(commit(key, ["c", "a"]))


def add_rounds(url: str, run_id: str, numbers: range, *, clients: Sequence[str] = "abc") -> None:
    """Store committed rounds with all these clients; `digest` names their files."""
    engine = create_engine(url)
    keys = [{"run_id": run_id, "round": number, "attempt": 1} for number in numbers]
    begun = {"begun_at": AT.isoformat(), "available": "[]", "spent": 0}
    attempt = {**begun, "state": "committed", "reason": ""}
    member = {"host_id": "h", "state": "included", "reason": "", **_STORED_UPDATE}
    members = [
        {**key, **member, "position": position, "client_id": client}
        for key in keys
        for position, client in enumerate(clients)
    ]
    row = {"selector_scalars": "{}", "strategy_scalars": "{}", "seconds": 1.0, "bytes_down": 0}
    row |= {"bytes_up": 0, "committed_at": AT.isoformat(), "metrics": "{}", "spreads": "{}"}
    rounds = [
        {**key, **row, "model_blake3": digest(number), "state_blake3": digest(10**6 + number)}
        for key, number in zip(keys, numbers, strict=True)
    ]
    part = {"run_id": run_id, "picks": len(keys), "samples": 57, "included_attempt": 1}
    parts = [{**part, "client_id": client, "included_round": numbers[-1]} for client in clients]
    with engine.begin() as connection:
        connection.execute(insert(schema.attempts), [{**key, **attempt} for key in keys])
        connection.execute(insert(schema.members), members)
        connection.execute(insert(schema.rounds), rounds)
        connection.execute(delete(schema.participation).filter_by(run_id=run_id))
        connection.execute(insert(schema.participation), parts)
    engine.dispose()
