"""The table of committed rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    func,
    insert,
    select,
    update,
)

from potluck.common.learning.spread import QUANTILES, Coverage, Spread
from potluck.common.records.privacy_loss import RoundPrivacy
from potluck.server.store.attempt_table import last_commit
from potluck.server.store.late_table import put_late, read_late
from potluck.server.store.member_rows import read_members, take_part, take_part_late
from potluck.server.store.part import Part, of_attempt
from potluck.server.store.records import (
    AttemptKey,
    AttemptState,
    BestSoFar,
    LateRow,
    LateState,
    MemberRow,
    MemberState,
    Participation,
    RoundCommit,
    RoundRow,
)
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    Row,
    decode_json,
    decode_time,
    encode_json,
    encode_text,
    encode_time,
    encode_value,
    read_rows,
)

_KEY = ["run_id", "round"]


def decode_coverage(value: object) -> object:
    """Return a column's numbers of clients and samples for each metric; empty if an earlier release
    wrote the row."""
    return {} if value is None else decode_json(value)


def _decode_spreads(value: object) -> object:
    return {
        name: {**each, "quantiles": dict(zip(QUANTILES, each["quantiles"], strict=False))}
        for name, each in decode_json(value).items()
    }


def _encode_spreads(spreads: Mapping[str, Spread]) -> str:
    return encode_json(
        {
            name: {**vars(each), "quantiles": [*each.quantiles.values()]}
            for name, each in spreads.items()
        }
    )


def _encode_coverage(coverage: Mapping[str, Coverage]) -> str:
    return encode_json({name: vars(each) for name, each in coverage.items()})


def _encode_privacy(privacy: RoundPrivacy | None) -> str | None:
    return None if privacy is None else encode_json(vars(privacy))


_ENCODERS: Mapping[str, Callable[[Any], object]] = {
    "spreads": _encode_spreads,
    "coverage": _encode_coverage,
    "committed_at": encode_time,
    "privacy": _encode_privacy,
}
"""Functions that encode those fields of `RoundFacts` that are not plain values. Each field is a
column with the same name; `_read_round` decodes it."""

_read_round = Reader(
    RoundRow,
    "rounds",
    _KEY,
    {
        "selector_scalars": decode_json,
        "strategy_scalars": decode_json,
        "metrics": decode_json,
        "spreads": _decode_spreads,
        "committed_at": decode_time,
        "software": lambda value: {} if value is None else decode_json(value),
        "coverage": decode_coverage,
        "privacy": lambda value: None if value is None else decode_json(value),
    },
)
_read_best = Reader(BestSoFar, "rounds", ["run_id"])
_read_participation = Reader(Participation, "participation", ["run_id", "client_id"])


class Rounds(Part):
    """Stores and reads committed rounds, which never change."""

    def commit_round(self, commit: RoundCommit) -> None:
        """Commit a round of a run, in one transaction.

        Included members become INCLUDED, and members whose update was set aside become SPARED.
        Members that are still SELECTED or RECEIVED become LATE. Raises StorageError unless the
        attempt is open, the round follows the last committed one, and every included client is a
        member whose update has arrived.
        """
        key, attempts = commit.key, schema.attempts
        row = _values(commit)
        change = (
            update(attempts)
            .where(of_attempt(attempts, key), attempts.c.state == AttemptState.OPEN.value)
            .values(state=AttemptState.COMMITTED.value)
        )
        with self._database.transaction() as connection:
            last, model = last_commit(connection, key.run_id)
            if model is None or key.round != last + 1:
                raise self._refusal(f"{key} can't be committed after round {last}")
            if connection.execute(change).rowcount != 1:
                raise self._refusal(f"{key} can't be committed: it is not open")
            self._settle_members(connection, commit)
            connection.execute(insert(schema.rounds), row)
            take_part(connection, key, commit.included)
            put_late(connection, commit.late)
            joined = [row for row in commit.late if row.state is LateState.JOINED]
            take_part_late(connection, joined)

    def rounds(self, run_id: str, *, after: int = 0, limit: int | None = None) -> list[RoundRow]:
        """Return the first `limit` committed rounds of a run with numbers above `after`."""
        rounds = schema.rounds
        with self._database.transaction() as connection:
            where = and_(rounds.c.run_id == run_id, rounds.c.round > after)
            return _read(connection, where, limit)

    def round(self, run_id: str, number: int) -> RoundRow | None:
        """Return one committed round of a run; None if this round is not committed."""
        found = self.rounds(run_id, after=number - 1, limit=1)
        return found[0] if found and found[0].key.round == number else None

    def last_round(self, run_id: str) -> RoundRow | None:
        """Return the last committed round of a run; None if no round is committed."""
        rounds = schema.rounds
        with self._database.transaction() as connection:
            last, _ = last_commit(connection, run_id)
            found = _read(connection, and_(rounds.c.run_id == run_id, rounds.c.round == last))
        return found[0] if found else None

    def last_rounds(self) -> dict[str, int]:
        """Return the number of each run's last committed round; 0 if no round is committed."""
        runs, rounds = schema.runs, schema.rounds
        last = select(func.max(rounds.c.round)).where(rounds.c.run_id == runs.c.run_id)
        query = select(runs.c.run_id, func.coalesce(last.scalar_subquery(), 0))
        with self._database.transaction() as connection:
            return {run_id: int(number) for run_id, number in connection.execute(query)}

    def participation(self, run_id: str) -> list[Participation]:
        """Return the participation of each client that was selected in a committed round of a run,
        sorted by id."""
        table = schema.participation
        with self._database.transaction() as connection:
            rows = read_rows(connection, select(table).where(table.c.run_id == run_id))
            found = [_read_participation(row) for row in rows]
        return sorted(found, key=lambda each: each.client_id)

    def updates_arrived(self, run_id: str) -> list[tuple[str, int, int | None, int]]:
        """Return how many updates have arrived from each client of a run, in all attempts.

        Each entry is a client, the number of samples that it reported (0 if masks hide it), the
        passes that the selector set (None for the run's number), and the number of updates with
        these values. Sorted by client.
        """
        members = schema.members
        kind = (members.c.client_id, members.c.samples, members.c.epochs)
        query = (
            select(*kind, func.count())
            .where(members.c.run_id == run_id, members.c.blake3.is_not(None))
            .group_by(*kind)
        )
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
        found = [(client, samples or 0, epochs, count) for client, samples, epochs, count in rows]
        return sorted(found, key=lambda each: (each[0], each[1], each[2] or 0))

    def _settle_members(self, connection: Connection, commit: RoundCommit) -> None:
        members, key, included = schema.members, commit.key, commit.included
        query = select(members.c.client_id, members.c.position).where(
            of_attempt(members, key), members.c.state == MemberState.RECEIVED.value
        )
        received = {row.client_id: row.position for row in connection.execute(query)}
        missing = sorted(set(included) - set(received))
        if missing or len(set(included)) != len(included):
            why = f"{missing[0]} has sent no update" if missing else "one of them is named twice"
            raise self._refusal(f"{key} can't include these clients: {why}")
        if included:
            connection.execute(
                update(members)
                .where(of_attempt(members, key), members.c.position == bindparam("place"))
                .values(state=MemberState.INCLUDED.value),
                [{"place": received[client_id]} for client_id in included],
            )
        for client_id, reason in commit.set_aside.items():
            connection.execute(
                update(members)
                .where(of_attempt(members, key), members.c.client_id == client_id)
                .values(state=MemberState.SPARED.value, trouble=encode_text(reason))
            )
        waiting = (MemberState.SELECTED.value, MemberState.RECEIVED.value)
        connection.execute(
            update(members)
            .where(of_attempt(members, key), members.c.state.in_(waiting))
            .values(state=MemberState.LATE.value, trouble="the round ended without it")
        )


def _values(commit: RoundCommit) -> dict[str, Any]:
    return {
        **commit.key._asdict(),
        "model_blake3": commit.model_blake3,
        "state_blake3": commit.state_blake3,
        "selector_scalars": encode_json(commit.selector_scalars),
        "strategy_scalars": encode_json(commit.strategy_scalars),
        "metrics": encode_json(
            {name: value for name, value in commit.metrics.items() if not math.isnan(value)}
        ),
        **best_values(commit.best),
        **{
            name: _ENCODERS.get(name, encode_value)(value) for name, value in commit.facts().items()
        },
    }


def best_values(best: BestSoFar | None) -> dict[str, Any]:
    """Return the column values of a run's best value up to now; NULL if there is none."""
    return {
        f"best_{each.name}": None if best is None else encode_value(getattr(best, each.name))
        for each in fields(BestSoFar)
    }


def best_of(row: Row) -> BestSoFar | None:
    """Read from a round's row the best value up to that round; None if there is none."""
    if row["best_measure"] is None:
        return None
    values = {each.name: row[f"best_{each.name}"] for each in fields(BestSoFar)}
    return _read_best({"run_id": row["run_id"], **values})


def _read(
    connection: Connection, where: ColumnElement[bool], limit: int | None = None
) -> list[RoundRow]:
    rounds, members, attempts = schema.rounds, schema.members, schema.attempts
    query = select(rounds).where(where).order_by(rounds.c.round).limit(limit)
    rows = read_rows(connection, query)
    if not rows:
        return []
    numbers = [row["round"] for row in rows]
    of_rounds = and_(
        members.c.run_id == rows[0]["run_id"],
        members.c.round >= min(numbers),
        members.c.round <= max(numbers),
    )
    committed = and_(
        attempts.c.run_id == members.c.run_id,
        attempts.c.round == members.c.round,
        attempts.c.attempt == members.c.attempt,
        attempts.c.state == AttemptState.COMMITTED.value,
    )
    selected = select(attempts.c.run_id).where(committed).exists()
    found = read_members(connection, and_(of_rounds, selected))
    late = schema.late_updates
    joined = and_(
        late.c.run_id == rows[0]["run_id"],
        late.c.joined_round >= min(numbers),
        late.c.joined_round <= max(numbers),
    )
    came: dict[int | None, list[LateRow]] = {}
    for each in read_late(connection, joined):
        came.setdefault(each.joined_round, []).append(each)
    return [_record(row, found, came.get(row["round"], ())) for row in rows]


def _record(
    row: Row, found: Mapping[AttemptKey, Sequence[MemberRow]], late: Sequence[LateRow]
) -> RoundRow:
    key = AttemptKey(row["run_id"], row["round"], row["attempt"])
    return _read_round(row, key=key, members=found.get(key, ()), late=late, best=best_of(row))
