"""Finds the stored files that the rounds of runs reference."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, func, literal, select, union_all

from potluck.server.store.part import Part
from potluck.server.store.records import FileHolder, FileReference
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import Reader, read_rows

_KEY = ["run_id", "round"]
_read_reference = Reader(FileReference, "rounds", _KEY)
_read_holder = Reader(FileHolder, "rounds", _KEY)


def _holders() -> Select[Any]:
    runs, rounds = schema.runs, schema.rounds
    wanted: BindParameter[Any] = bindparam("wanted", expanding=True)
    named = union_all(
        select(
            rounds.c.model_blake3.label("blake3"),
            rounds.c.run_id,
            rounds.c.round,
            literal(0).label("of_state"),
        ).where(rounds.c.model_blake3.in_(wanted)),
        select(rounds.c.state_blake3, rounds.c.run_id, rounds.c.round, literal(1)).where(
            rounds.c.state_blake3.in_(wanted)
        ),
        select(runs.c.initial_model_blake3, runs.c.run_id, literal(0), literal(0)).where(
            runs.c.initial_model_blake3.in_(wanted)
        ),
    ).subquery()
    committed = (
        select(func.coalesce(func.max(rounds.c.round), 0))
        .where(rounds.c.run_id == runs.c.run_id)
        .scalar_subquery()
    )
    best = (
        select(rounds.c.best_round)
        .where(rounds.c.run_id == runs.c.run_id)
        .order_by(rounds.c.round.desc())
        .limit(1)
        .scalar_subquery()
    )
    return select(
        named,
        committed.label("committed_rounds"),
        best.label("best_round"),
        runs.c.run_file,
    ).join(runs, runs.c.run_id == named.c.run_id)


# Each statement is built only once, because in SQLite, building it takes longer than executing it.
_HOLDERS = _holders()
_INITIAL_MODEL = select(
    schema.runs.c.run_id, schema.runs.c.initial_model_blake3.label("model_blake3")
).where(
    schema.runs.c.run_id == bindparam("run_id"), schema.runs.c.initial_model_blake3.is_not(None)
)
_FILES_OF_ROUNDS = (
    select(
        schema.rounds.c.run_id,
        schema.rounds.c.round,
        schema.rounds.c.model_blake3,
        schema.rounds.c.state_blake3,
    )
    .where(
        schema.rounds.c.run_id == bindparam("run_id"),
        schema.rounds.c.round.between(bindparam("first"), bindparam("last")),
    )
    .order_by(schema.rounds.c.round)
)
_BEST_ROUNDS = (
    select(schema.rounds.c.best_round)
    .where(
        schema.rounds.c.run_id == bindparam("run_id"),
        schema.rounds.c.round.between(bindparam("first"), bindparam("last")),
        schema.rounds.c.best_round.is_not(None),
    )
    .distinct()
)
_LAST_OF_ALL = 2**31 - 1


class References(Part):
    """Finds the files that rounds reference, and the rounds that reference a file."""

    def model_references(
        self, run_id: str, *, first: int = 0, last: int = _LAST_OF_ALL
    ) -> list[FileReference]:
        """Return the files referenced by rounds `first` to `last` of a run. Round 0 is the initial
        model."""
        with self._database.transaction() as connection:
            committed = read_rows(
                connection, _FILES_OF_ROUNDS, run_id=run_id, first=first, last=last
            )
            found = [_read_reference(row) for row in committed]
            if first <= 0 <= last:
                rows = read_rows(connection, _INITIAL_MODEL, run_id=run_id)
                found[:0] = [_read_reference(row, round=0, state_blake3=None) for row in rows]
        return found

    def best_references(self, run_id: str, *, first: int, last: int) -> list[FileReference]:
        """Return the files of a run's best rounds, sorted by round. A best round is one that was
        the best so far after one of the rounds `first` to `last`."""
        with self._database.transaction() as connection:
            bests = connection.execute(
                _BEST_ROUNDS, {"run_id": run_id, "first": first, "last": last}
            )
            return [
                _read_reference(row)
                for number in sorted(bests.scalars())
                for row in read_rows(
                    connection, _FILES_OF_ROUNDS, run_id=run_id, first=number, last=number
                )
            ]

    def named_files(self) -> set[str]:
        """Return the digests of all files that a round or run references."""
        runs, rounds = schema.runs, schema.rounds
        columns = (rounds.c.model_blake3, rounds.c.state_blake3, runs.c.initial_model_blake3)
        with self._database.transaction() as connection:
            found = {
                digest
                for column in columns
                for digest in connection.execute(select(column)).scalars()
            }
        return {str(digest) for digest in found if digest is not None}

    def holders(self, digests: Collection[str]) -> list[FileHolder]:
        """Return the rounds, of all runs, that reference one of these files."""
        with self._database.transaction() as connection:
            rows = read_rows(connection, _HOLDERS, wanted=list(digests))
            return [_read_holder(row) for row in rows]
