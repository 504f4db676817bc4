"""Copies the rows of a committed round out of a database, and restores such copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from potluck.server.store.attempt_table import last_commit
from potluck.server.store.part import Part, upsert
from potluck.server.store.records import LateState, RunState
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import encode_text, encode_time, read_rows

Tables = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by table, with the database's column values."""

_IN_ORDER = (
    schema.roster,
    schema.attempts,
    schema.members,
    schema.late_updates,
    schema.exchanges,
    schema.rounds,
    schema.participation,
)
"""The tables that have rows of a round. A table comes after the tables that it references."""


class RoundCopies(Part):
    """Copies of committed rounds, stored outside the database in case it is lost."""

    def copy_round(self, run_id: str, number: int, *, roster_from: int) -> Tables:
        """Return all rows of a committed round that are not in copies of earlier rounds.

        roster_from: first row of the roster to copy; with 0, the run's own row is copied as well.
        """
        runs, members, late = schema.runs, schema.members, schema.late_updates
        of_round = {table: _of_round(table, run_id, number) for table in _IN_ORDER[1:]}
        of_round[late] = and_(
            late.c.run_id == run_id,
            or_(late.c.state == LateState.AWAITED.value, late.c.joined_round == number),
        )
        # A late update is in the row of a cohort's member, which belongs to an earlier round.
        is_late = and_(
            late.c.run_id == members.c.run_id,
            late.c.round == members.c.round,
            late.c.attempt == members.c.attempt,
            late.c.client_id == members.c.client_id,
        )
        with self._database.transaction() as connection:
            tables = {
                table.name: read_rows(connection, select(table).where(where))
                for table, where in of_round.items()
            }
            query = select(members).join(late, is_late).where(of_round[late])
            own = tables[members.name]
            joined = [row for row in read_rows(connection, query) if row["round"] != number]
            tables[members.name] = [*own, *joined]
            taking_part = sorted({str(row["client_id"]) for row in tables[members.name]})
            table = schema.participation
            where = and_(table.c.run_id == run_id, table.c.client_id.in_(taking_part))
            tables[table.name] = read_rows(connection, select(table).where(where))
            roster = schema.roster
            where = and_(roster.c.run_id == run_id, roster.c.row >= roster_from)
            tables[roster.name] = read_rows(
                connection, select(roster).where(where).order_by(roster.c.row)
            )
            if not roster_from:
                query = select(runs).where(runs.c.run_id == run_id)
                tables[runs.name] = read_rows(connection, query)
            tables[schema.quarantine.name] = read_rows(connection, select(schema.quarantine))
        return tables

    def put_run(self, row: Mapping[str, Any], at: datetime) -> None:
        """Restore the row of a run, in the state stopped. The run gets another number if its own is
        taken."""
        runs = schema.runs
        with self._database.transaction() as connection:
            numbers = list(connection.execute(select(runs.c.number)).scalars())
            changes = {"state": RunState.STOPPED.value, "changed_at": encode_time(at)}
            if row["number"] in numbers:
                changes["number"] = max(numbers) + 1
            connection.execute(insert(runs), _known(runs, {**row, **changes}))

    def put_round(self, run_id: str, number: int, tables: Tables) -> None:
        """Restore a round. Existing rows of attempts at this round are replaced.

        Raises StorageError unless the round follows the last committed one.
        """
        late = schema.late_updates
        with self._database.transaction() as connection:
            last, _ = last_commit(connection, run_id)
            if number != last + 1:
                raise self._refusal(f"round {number} of run {run_id} can't follow round {last}")
            _clear_after(connection, run_id, last)
            connection.execute(
                update(late)
                .where(late.c.run_id == run_id, late.c.state == LateState.AWAITED.value)
                .values(state=LateState.DROPPED.value)
            )
            for table in _IN_ORDER:
                rows = [_known(table, row) for row in tables.get(table.name, ())]
                keys = set(table.primary_key.columns)
                others = [column.name for column in table.columns if column not in keys]
                upsert(connection, table, rows, update=[c for c in others if rows and c in rows[0]])

    def put_quarantine(self, tables: Tables) -> None:
        """Restore the clients in quarantine, if the database has none."""
        quarantine = schema.quarantine
        rows = [_known(quarantine, row) for row in tables.get(quarantine.name, ())]
        with self._database.transaction() as connection:
            there = connection.execute(select(func.count()).select_from(quarantine)).scalar_one()
            if rows and not there:
                connection.execute(insert(quarantine), rows)

    def end_put_back(self, run_id: str, reason: str, at: datetime) -> None:
        """Set the state of a run whose rounds were restored: finished if it has all rounds, else
        stopped."""
        runs = schema.runs
        with self._database.transaction() as connection:
            last, _ = last_commit(connection, run_id)
            wanted = connection.execute(
                select(runs.c.rounds).where(runs.c.run_id == run_id)
            ).scalar_one()
            state = RunState.FINISHED if last >= wanted else RunState.STOPPED
            connection.execute(
                update(runs)
                .where(runs.c.run_id == run_id)
                .values(
                    state=state.value,
                    reason=encode_text("" if state is RunState.FINISHED else reason),
                    changed_at=encode_time(at),
                )
            )


def _of_round(table: Table, run_id: str, number: int) -> ColumnElement[bool]:
    where = table.c.run_id == run_id
    return and_(where, table.c.round == number) if "round" in table.c else where


def _clear_after(connection: Connection, run_id: str, last: int) -> None:
    """Delete the rows of attempts after round `last`, the last committed one."""
    for table in (schema.late_updates, schema.exchanges, schema.members, schema.attempts):
        connection.execute(delete(table).where(table.c.run_id == run_id, table.c.round > last))


def _known(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return those columns of a row that the table has. Another release may have written the
    row."""
    return {name: value for name, value in row.items() if name in table.c}
