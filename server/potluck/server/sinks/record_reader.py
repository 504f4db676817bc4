"""Reads runs and committed rounds for sinks from the coordinator's database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from potluck.common.errors import NotFoundError
from potluck.server.plan.pretraining import is_pretraining
from potluck.server.sink import TrackedRound, TrackedRun
from potluck.server.store.records import RoundRow, RunRow
from potluck.server.store.round_record import round_record
from potluck.server.store.round_table import Rounds
from potluck.server.store.run_table import Runs
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import encode_time
from potluck.server.store.sql.failures import UnreadableRowError
from potluck.server.store.sql.reading import open_for_reading


class _TablesOfRuns(Runs, Rounds):
    """The part of the store whose tables sinks need."""


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """The runs that can be read, and the runs that can't, each with the reason."""

    rows: Sequence[RunRow]
    unreadable: Mapping[str, str]


class RecordReader:
    """Reads runs from the database. Every method blocks, and raises StorageError if the database
    fails."""

    def __init__(self, url: str) -> None:
        """url: URL of the database, as in the coordinator's configuration."""
        self._database = open_for_reading(url)
        self._tables = _TablesOfRuns(self._database)

    def runs(self, delivered: Mapping[str, str]) -> FoundRuns:
        """Return all runs except the delivered ones, oldest first.

        delivered: for each run, the time of the last state change that was delivered. A run whose
        state has changed since then is returned.
        """
        runs = schema.runs
        query = select(runs.c.run_id, runs.c.changed_at).order_by(runs.c.number)
        with self._database.transaction() as connection:
            found = [(str(run_id), str(at)) for run_id, at in connection.execute(query)]
        rows: list[RunRow] = []
        unreadable: dict[str, str] = {}
        for run_id, changed_at in found:
            if delivered.get(run_id) == changed_at or is_pretraining(run_id):
                continue
            try:
                rows.append(self._tables.run(run_id))
            except NotFoundError:  # the run was deleted meanwhile
                continue
            except UnreadableRowError as error:
                unreadable[run_id] = error.message
        return FoundRuns(rows=rows, unreadable=unreadable)

    def rounds(self, run_id: str, *, after: int, limit: int) -> list[TrackedRound]:
        """Return the first `limit` committed rounds of a run with numbers above `after`.

        Raises UnreadableRowError if a row is damaged.
        """
        rows = self._tables.rounds(run_id, after=after, limit=limit)
        return [_tracked_round(row) for row in rows]

    def close(self) -> None:
        """Disconnect from the database."""
        self._database.close()


def tracked_run(row: RunRow) -> TrackedRun:
    """Return a run in the form that sinks get."""
    return TrackedRun(
        run_id=row.run_id,
        name=row.name,
        run_file=row.run_file,
        task=row.task,
        selector=row.selector,
        strategy=row.strategy,
        rounds=row.rounds,
        count=row.count,
        seed=row.seed,
        created_at=row.created_at,
        state=row.state.value,
        reason=row.reason,
        changed_at=row.changed_at,
    )


def stamp(row: RunRow) -> str:
    """Return the time of a run's last state change as text; it changes if a resumed run ends
    again."""
    return encode_time(row.changed_at)


def _tracked_round(row: RoundRow) -> TrackedRound:
    return TrackedRound(**vars(round_record(row)))
