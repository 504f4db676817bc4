"""Evidence that a run left on disk, read without the product's code.

The database is read with sqlite3, files as bytes. So a bug in the code that writes can't hide a
wrong row from the test.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blake3 import blake3
from support.federation import Federation

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Rows of one run, without columns that differ between repetitions: ids, times, bytes.

    rounds: digests of models and states. members: members of committed attempts, in selection
    order. answers: the clients' answers in these attempts.
    """

    state: str
    roster: tuple[str, ...]
    rounds: tuple[Row, ...]
    members: tuple[Row, ...]
    answers: tuple[Row, ...]

    def check_like(self, other: Evidence) -> None:
        """Raise AssertionError with the first difference from an undisturbed run."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            assert mine == theirs, f"{each.name}: {mine}, undisturbed: {theirs}"


def evidence(federation: Federation, run_id: str, *, unequal: Collection[str] = ()) -> Evidence:
    """Return a finished run's rows; assert that each part is complete and recorded once.

    unequal: further columns of members that differ between repetitions of a run.
    """
    with _database(federation) as database:
        [run] = _rows(database, "SELECT * FROM runs WHERE run_id = ?", run_id)
        roster = _rows(database, "SELECT * FROM roster WHERE run_id = ? ORDER BY row", run_id)
        rounds = _rows(database, "SELECT * FROM rounds WHERE run_id = ? ORDER BY round", run_id)
        attempts = _rows(database, "SELECT * FROM attempts WHERE run_id = ?", run_id)
        members = _rows(database, _OF_COMMITTED.format(table="members", order="position"), run_id)
        answers = _rows(database, _OF_COMMITTED.format(table="exchanges", order="step"), run_id)
        sums = _rows(database, "SELECT * FROM secure_sums WHERE run_id = ?", run_id)
    assert [row["round"] for row in rounds] == [*range(1, run["rounds"] + 1)], "rounds committed"
    committed = {(row["round"], row["attempt"]) for row in rounds}
    for attempt in attempts:
        key = (attempt["round"], attempt["attempt"])
        wanted = {"committed"} if key in committed else {"failed", "excused", "abandoned"}
        assert attempt["state"] in wanted, f"attempt {key} is {attempt['state']}"
    _check_sums(sums)
    return Evidence(
        state=f"{run['state']} {run['reason']}".strip(),
        roster=tuple(row["client_id"] for row in roster),
        rounds=tuple(_without(row, "attempt", "seconds", *_MEASURED) for row in rounds),
        members=tuple(_without(row, *_UNEQUAL, *unequal) for row in members),
        answers=tuple(_without(row, *_UNEQUAL) for row in answers),
    )


_LAST_TWO = """
    SELECT model_blake3, state_blake3, round = last AS newest FROM rounds
    JOIN (SELECT run_id, MAX(round) AS last FROM rounds GROUP BY run_id) USING (run_id)
    WHERE round > last - 2
"""
_MEASURED = ("run_id", "bytes_down", "bytes_up", "committed_at")
_UNEQUAL = ("run_id", "attempt", "seconds", "data_epoch", "software")
"""Columns of members that differ between repetitions of a run.

The last two are missing if a member's host was disconnected when the member was selected.
"""
_OF_COMMITTED = """
    SELECT one.* FROM {table} AS one JOIN rounds USING (run_id, round, attempt)
    WHERE run_id = ? ORDER BY round, {order}
"""


def check_files(federation: Federation) -> None:
    """Check that every file of the last rounds exists and has the digest in its name."""
    wanted = _wanted_files(federation)
    for name in wanted:
        path = federation.state / "models" / name
        if path.suffix == ".safetensors":
            assert blake3(path.read_bytes()).hexdigest() == path.stem, f"{path} is damaged"


def left_over(federation: Federation) -> list[Path]:
    """Return the files that are no longer needed while no run is active."""
    wanted = _wanted_files(federation)
    models = [path for path in (federation.state / "models").iterdir() if path.name not in wanted]
    return [*models, *federation.state.glob("spool/*")]


def _wanted_files(federation: Federation) -> set[str]:
    """Return the file names of each run's last two models and last state; runs have ≥ 2 rounds."""
    wanted: set[str] = set()
    with _database(federation) as database:
        for row in database.execute(_LAST_TWO):
            wanted |= {f"{row['model_blake3']}.safetensors", f"{row['model_blake3']}.json"}
            if row["state_blake3"] and row["newest"]:
                wanted.add(f"{row['state_blake3']}.safetensors")
    return wanted


def _check_sums(sums: list[Row]) -> None:
    """Check that all released update sums of a round are over the same clients.

    The difference of two sums over other sets would disclose updates.
    """
    survivors: dict[int, set[str]] = {}
    for row in sums:
        record = json.loads(row["record"])
        if row["kind"] == "update" and record["outcome"] == "released":
            first = survivors.setdefault(record["round"], set(record["clients"]))
            assert set(record["clients"]) == first, f"two sums of round {record['round']}"


@contextlib.contextmanager
def _database(federation: Federation) -> Iterator[sqlite3.Connection]:
    path = federation.state / "potluck.sqlite3"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def _rows(database: sqlite3.Connection, query: str, run_id: str) -> list[Row]:
    return [dict(row) for row in database.execute(query, [run_id])]


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
