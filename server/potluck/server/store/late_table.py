"""The table of trainings that missed their round, whose updates may join a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, select, update

from potluck.common.errors import NotFoundError
from potluck.server.store.member_rows import read_members, update_values
from potluck.server.store.part import Part, of_attempt, upsert
from potluck.server.store.records import (
    AttemptKey,
    AttemptState,
    LateRow,
    LateState,
    MemberState,
    UpdateRow,
)
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import Reader, encode_text, read_rows

_read_late = Reader(LateRow, "late_updates", ["run_id", "round", "client_id"])


class LateTrainings(Part):
    """Stores trainings that missed their round. Their updates are in the table `members`, in the
    rows of their clients."""

    def awaited(self, run_id: str) -> list[LateRow]:
        """Return those trainings of a run whose updates may still join a round, sorted by
        client."""
        table = schema.late_updates
        where = and_(table.c.run_id == run_id, table.c.state == LateState.AWAITED.value)
        with self._database.transaction() as connection:
            return read_late(connection, where)

    def set_late(self, rows: Sequence[LateRow]) -> None:
        """Store the states of late trainings."""
        with self._database.transaction() as connection:
            put_late(connection, rows)

    def add_late_update(self, key: AttemptKey, client_id: str, received: UpdateRow) -> None:
        """Store an update that arrived after the round had stopped waiting for its client.

        Raises NotFoundError if the client is not a late member of the cohort, StorageError if the
        attempt was abandoned.
        """
        attempts, members = schema.attempts, schema.members
        with self._database.transaction() as connection:
            query = select(attempts.c.state).where(of_attempt(attempts, key))
            state = connection.execute(query).scalar_one_or_none()
            if state not in (None, AttemptState.OPEN.value, AttemptState.COMMITTED.value):
                raise self._refusal(f"{key} was abandoned", client=client_id)
            change = (
                update(members)
                .where(
                    of_attempt(members, key),
                    members.c.client_id == client_id,
                    members.c.state != MemberState.INCLUDED.value,
                )
                .values(update_values(received))
            )
            if connection.execute(change).rowcount != 1:
                raise NotFoundError(
                    f"client {client_id} is not late in the cohort of {key}", client=client_id
                )


def put_late(connection: Connection, rows: Sequence[LateRow]) -> None:
    """Store the states of late trainings."""
    values: list[dict[str, Any]] = [
        {
            "run_id": row.run_id,
            "round": row.round,
            "client_id": row.client_id,
            "attempt": row.attempt,
            "state": row.state.value,
            "model_blake3": row.model_blake3,
            "seconds_left": row.seconds_left,
            "joined_round": row.joined_round,
            "weight": row.weight,
            "trouble": None if row.trouble is None else encode_text(row.trouble),
        }
        for row in rows
    ]
    changing = ["state", "seconds_left", "joined_round", "weight", "trouble"]
    upsert(connection, schema.late_updates, values, update=changing)


def read_late(connection: Connection, where: ColumnElement[bool]) -> list[LateRow]:
    """Return trainings sorted by client and round, each with its update if it has arrived."""
    table, members = schema.late_updates, schema.members
    query = select(table).where(where).order_by(table.c.client_id, table.c.round)
    found: list[LateRow] = []
    for row in read_rows(connection, query):
        key = AttemptKey(row["run_id"], row["round"], row["attempt"])
        of_client = and_(of_attempt(members, key), members.c.client_id == row["client_id"])
        [member] = read_members(connection, of_client)[key]
        found.append(_read_late(row, update=member.update, work=member.work))
    return found
