"""Copies of the rows of committed rounds: taken from a database, kept as files, restored."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
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

from potluck.common.disk import sync_data
from potluck.common.errors import StorageError
from potluck.server.store.attempt_table import last_commit
from potluck.server.store.part import Part, upsert
from potluck.server.store.records import LateState, RunState
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import encode_text, encode_time, read_rows

# Copies of rows -----------------------------------------------------------------------------------

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
"""The tables that have rows of a round. Each table comes after the tables that it references, so
rows can be inserted in this order."""


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
        # A late update stands in the row of its client in the cohort of an earlier round.
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
        """Restore the row of a run, in the state stopped. The run gets another number if another
        run has its number."""
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
    """Return those columns of a row that the table has: another release, with other columns, may
    have written the row."""
    return {name: value for name, value in row.items() if name in table.c}


# Files of copies ----------------------------------------------------------------------------------
# The files RUN/ROUND are next to the database. They are compressed JSON; the checksum of the
# compression detects damage. Blocking; call it from any thread, but from only one at a time.


class RoundRecords:
    """The records of all runs in one folder, which is created with the first record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, run_id: str, number: int, tables: Tables) -> None:
        """Write the record of a round; return when it is on disk. Raises StorageError."""
        path = self._path(run_id, number)
        temporary = path.with_name(f".{number}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(zlib.compress(json.dumps(tables).encode(), level=1))
                file.flush()
                sync_data(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)  # frees space if the disk is full

    def read(self, run_id: str, number: int) -> Tables:
        """Return the rows of a round. Raises StorageError if its record is missing or damaged."""
        path = self._path(run_id, number)
        try:
            tables: Tables = json.loads(zlib.decompress(path.read_bytes()))
        except OSError as error:
            raise _unusable(path, error) from error
        except (zlib.error, ValueError) as error:
            raise StorageError(f"{path} is damaged; restore it from a backup", path=path) from error
        return tables

    def has(self, run_id: str, number: int) -> bool:
        """Return True if a round has a record."""
        return self._path(run_id, number).is_file()

    def runs(self) -> list[str]:
        """Return the runs that have records, sorted. Raises StorageError."""
        return sorted(_names(self._folder))

    def rounds(self, run_id: str) -> list[int]:
        """Return the rounds of a run that have records, in order. Raises StorageError."""
        return sorted(int(name) for name in _names(self._folder / run_id) if name.isdecimal())

    def drop_after(self, run_id: str, number: int) -> None:
        """Delete the records of a run's rounds after `number`, because these rounds will be
        repeated.

        Raises StorageError.
        """
        for each in self.rounds(run_id):
            if each > number:
                self._path(run_id, each).unlink(missing_ok=True)

    def _path(self, run_id: str, number: int) -> Path:
        return self._folder / run_id / str(number)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: {error.strerror}; check the disk of this file", path=path)
