"""The tables of runs and their rosters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, Select, and_, func, insert, select, update

from potluck.common.errors import NotFoundError
from potluck.common.trainer import Measure
from potluck.server.store.part import Part
from potluck.server.store.records import NewRun, RunRow, RunState
from potluck.server.store.round_table import best_of, decode_coverage
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    decode_json,
    decode_time,
    encode_text,
    encode_time,
    read_rows,
)

_UNFINISHED = (RunState.WAITING, RunState.RUNNING)
_SHOWN = 10


def _decode_measures(value: object) -> dict[str, Measure]:
    return {name: Measure(**declared) for name, declared in decode_json(value)}


_read_run = Reader(
    RunRow,
    "runs",
    ["run_id"],
    {
        "created_at": decode_time,
        "changed_at": decode_time,
        "measures": _decode_measures,
        "best_coverage": decode_coverage,
    },
)


class Runs(Part):
    """Stores and reads runs, with their states and rosters."""

    def add_run(self, run: NewRun) -> None:
        """Store a new run, in the state waiting. Raises StorageError if a run with its id
        exists."""
        row = {
            "run_id": run.run_id,
            "name": encode_text(run.name),
            "run_file": encode_text(run.run_file),
            "created_at": encode_time(run.created_at),
            "rounds": run.rounds,
            "count": run.count,
            "seed": str(run.seed),
            "task": run.task,
            "selector": run.selector,
            "strategy": run.strategy,
            "measures": json.dumps([[name, vars(each)] for name, each in run.measures.items()]),
            "state": RunState.WAITING.value,
            "reason": "",
            "changed_at": encode_time(run.created_at),
        }
        with self._database.transaction() as connection:
            if _exists(connection, run.run_id):
                raise self._refusal(f"run {run.run_id} exists already", run=run.run_id)
            last = connection.execute(
                select(func.coalesce(func.max(schema.runs.c.number), 0))
            ).scalar_one()
            connection.execute(insert(schema.runs), {**row, "number": last + 1})

    def set_run_state(self, run_id: str, state: RunState, reason: str, at: datetime) -> None:
        """Store the state of a run and its reason. Raises NotFoundError."""
        change = (
            update(schema.runs)
            .where(schema.runs.c.run_id == run_id)
            .values(state=state.value, reason=encode_text(reason), changed_at=encode_time(at))
        )
        with self._database.transaction() as connection:
            if connection.execute(change).rowcount != 1:
                raise _no_run(connection, run_id)

    def set_initial_model(self, run_id: str, model_blake3: str, at: datetime) -> None:
        """Store the model before round 1. Raises StorageError if a different one is already
        stored."""
        runs = schema.runs
        with self._database.transaction() as connection:
            row = connection.execute(
                select(runs.c.initial_model_blake3).where(runs.c.run_id == run_id)
            ).one_or_none()
            if row is None:
                raise _no_run(connection, run_id)
            if row[0] not in (None, model_blake3):
                raise self._refusal(
                    f"run {run_id} started from model {row[0]}, not {model_blake3}", run=run_id
                )
            connection.execute(
                update(runs)
                .where(runs.c.run_id == run_id, runs.c.initial_model_blake3.is_(None))
                .values(initial_model_blake3=model_blake3, initial_model_at=encode_time(at))
            )

    def runs(self, *, before: int | None = None, limit: int | None = None) -> list[RunRow]:
        """Return all runs, newest first. limit: maximum number of runs. before: return only runs
        with smaller numbers."""
        number = schema.runs.c.number
        query = _rows().order_by(number.desc()).limit(limit)
        if before is not None:
            query = query.where(number < before)
        with self._database.transaction() as connection:
            return _read(connection, query)

    def unfinished_runs(self) -> list[RunRow]:
        """Return the waiting and running runs, oldest first, which a restarted coordinator
        resumes."""
        unfinished = schema.runs.c.state.in_([state.value for state in _UNFINISHED])
        with self._database.transaction() as connection:
            return _read(connection, _rows().where(unfinished).order_by(schema.runs.c.number))

    def runs_ended_since(self, at: datetime) -> list[str]:
        """Return the ids of the runs that ended after this time."""
        runs = schema.runs
        unfinished = runs.c.state.in_([state.value for state in _UNFINISHED])
        query = select(runs.c.run_id).where(~unfinished, runs.c.changed_at > encode_time(at))
        with self._database.transaction() as connection:
            return [str(run_id) for run_id in connection.execute(query).scalars()]

    def run(self, run_id: str) -> RunRow:
        """Return a run by its id, by a unique prefix of its id, or by its unique name.

        Raises NotFoundError if no run matches, or if several runs match; the error then lists these
        runs.
        """
        text = encode_text(run_id)
        with self._database.transaction() as connection:
            found = _read(connection, _rows().where(schema.runs.c.run_id == text))
            if found:
                return found[0]
            meant = _meant(connection, text)
            if not meant:
                raise _no_run(connection, run_id)
            if len(meant) > 1:
                raise NotFoundError(
                    f"{run_id!r} matches {len(meant)} runs; use the id of a single run (newest "
                    f"first): {_listed(meant)}",
                    run=run_id,
                )
            return _read(connection, _rows().where(schema.runs.c.run_id == meant[0]))[0]

    def append_to_roster(self, run_id: str, client_ids: Sequence[str]) -> None:
        """Append clients to a run's roster; their row numbers follow the existing ones, from 0.

        Raises StorageError if a client is in the roster already.
        """
        roster = schema.roster
        with self._database.transaction() as connection:
            if not _exists(connection, run_id):
                raise _no_run(connection, run_id)
            there = select(roster.c.client_id).where(roster.c.run_id == run_id)
            known = list(connection.execute(there).scalars())
            taken = set(known)
            for client_id in client_ids:
                if client_id in taken:
                    raise self._refusal(
                        f"client {client_id} is already in the roster of run {run_id}",
                        run=run_id,
                        client=client_id,
                    )
                taken.add(client_id)
            rows = [
                {"run_id": run_id, "row": row, "client_id": client_id}
                for row, client_id in enumerate(client_ids, len(known))
            ]
            if rows:
                connection.execute(insert(roster), rows)

    def roster(self, run_id: str) -> list[str]:
        """Return a run's clients. The position of a client is its permanent row number."""
        roster = schema.roster
        with self._database.transaction() as connection:
            rows = connection.execute(
                select(roster.c.row, roster.c.client_id)
                .where(roster.c.run_id == run_id)
                .order_by(roster.c.row)
            ).all()
            for place, (row, client_id) in enumerate(rows):
                if row != place or not isinstance(client_id, str):
                    raise self._refusal(
                        f"table roster, run_id {run_id!r}: row {place} is missing or damaged; "
                        "restore the database from a backup",
                        run=run_id,
                    )
        return [client_id for _, client_id in rows]


def _rows() -> Select[tuple[object, ...]]:
    runs, rounds = schema.runs, schema.rounds
    last, best = rounds.alias("last"), rounds.alias("best")
    newest = (
        select(func.max(rounds.c.round)).where(rounds.c.run_id == runs.c.run_id).scalar_subquery()
    )
    of_last = and_(last.c.run_id == runs.c.run_id, last.c.round == newest)
    of_best = and_(best.c.run_id == runs.c.run_id, best.c.round == last.c.best_round)
    return select(
        runs,
        func.coalesce(last.c.round, 0).label("committed_rounds"),
        func.coalesce(last.c.model_blake3, runs.c.initial_model_blake3).label("model_blake3"),
        *(column for column in last.c if column.name.startswith("best_")),
        best.c.model_blake3.label("best_model_blake3"),
        best.c.coverage.label("best_coverage"),
    ).select_from(runs.outerjoin(last, of_last).outerjoin(best, of_best))


def _read(connection: Connection, query: Select[tuple[object, ...]]) -> list[RunRow]:
    return [_read_run(row, best=best_of(row)) for row in read_rows(connection, query)]


def _meant(connection: Connection, text: str) -> list[str]:
    """Return the ids of runs whose id begins with `text`, or whose name is `text`; newest first."""
    if not text:
        return []
    runs = schema.runs
    named = runs.c.name == text
    begun = runs.c.run_id.startswith(text, autoescape=True)
    query = select(runs.c.run_id, named).where(named | begun).order_by(runs.c.number.desc())
    # In SQLite, the query's LIKE ignores case, so each prefix is compared again.
    return [
        str(each)
        for each, is_name in connection.execute(query)
        if is_name or str(each).startswith(text)
    ]


def _exists(connection: Connection, run_id: str) -> bool:
    query = select(schema.runs.c.run_id).where(schema.runs.c.run_id == run_id)
    return connection.execute(query).first() is not None


def _no_run(connection: Connection, run_id: str) -> NotFoundError:
    newest_first = select(schema.runs.c.run_id).order_by(schema.runs.c.number.desc())
    there = [str(each) for each in connection.execute(newest_first).scalars()]
    return NotFoundError(f"there is no run {run_id!r}; the runs are: {_listed(there)}", run=run_id)


def _listed(run_ids: Sequence[str]) -> str:
    if not run_ids:
        return "none"
    more = f" and {len(run_ids) - _SHOWN} more" if len(run_ids) > _SHOWN else ""
    return ", ".join(run_ids[:_SHOWN]) + more
