"""The files that the rounds of runs name."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, literal, select, union_all

from potluck.server.store.part import Part
from potluck.server.store.records import FileHolder, FileReference
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import Reader, read_rows

_KEY = ["run_id", "round"]
_read_reference = Reader(FileReference, "rounds", _KEY)
_read_holder = Reader(FileHolder, "rounds", _KEY)


class References(Part):
    """Files by the rounds that name them, and the other way round."""

    def model_references(
        self, run_id: str, *, first: int = 0, last: int | None = None
    ) -> list[FileReference]:
        """The files that the rounds `first` to `last` of a run name; 0 is the initial model."""
        runs, rounds = schema.runs, schema.rounds
        initial = select(runs.c.run_id, runs.c.initial_model_blake3.label("model_blake3")).where(
            runs.c.run_id == run_id, runs.c.initial_model_blake3.is_not(None)
        )
        committed = (
            select(rounds.c.run_id, rounds.c.round, rounds.c.model_blake3, rounds.c.state_blake3)
            .where(rounds.c.run_id == run_id, rounds.c.round >= first)
            .order_by(rounds.c.round)
        )
        if last is not None:
            committed = committed.where(rounds.c.round <= last)
        with self._database.transaction() as connection:
            found = [_read_reference(row) for row in read_rows(connection, committed)]
            if first <= 0 and (last is None or last >= 0):
                rows = read_rows(connection, initial)
                found[:0] = [_read_reference(row, round=0, state_blake3=None) for row in rows]
        return found

    def holders(self, digests: Collection[str]) -> list[FileHolder]:
        """The rounds of all runs that name one of these files."""
        runs, rounds, wanted = schema.runs, schema.rounds, list(digests)
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
        query = select(named, committed.label("committed_rounds"), runs.c.run_file).join(
            runs, runs.c.run_id == named.c.run_id
        )
        with self._database.transaction() as connection:
            return [_read_holder(row) for row in read_rows(connection, query)]
