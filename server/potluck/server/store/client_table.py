"""The tables of known clients, clients in quarantine, and clients excluded from a run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, case, delete, func, select

from potluck.common.errors import NotFoundError
from potluck.server.store.part import Part, upsert
from potluck.server.store.records import (
    ClientRow,
    ClientSeen,
    LeftOutRow,
    MemberState,
    QuarantineRow,
)
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    Row,
    decode_time,
    encode_text,
    encode_time,
    read_rows,
)

_read_client = Reader(
    ClientRow, "clients", ["client_id"], {"first_seen_at": decode_time, "last_seen_at": decode_time}
)
_read_quarantine = Reader(QuarantineRow, "quarantine", ["client_id"], {"at": decode_time})
_read_left_out = Reader(LeftOutRow, "left_out", ["run_id", "client_id"], {"at": decode_time})


class Clients(Part):
    """Times of last contact, quarantine, and the clients excluded from each run."""

    def see_clients(self, seen: Sequence[ClientSeen]) -> None:
        """Store when clients were in contact, all in one transaction. An earlier time does not
        replace a later one."""
        rows = [
            {
                "client_id": client.client_id,
                "host_id": client.host_id,
                "device": encode_text(client.device),
                "first_seen_at": encode_time(client.at),
                "last_seen_at": encode_time(client.at),
            }
            for client in seen
        ]
        with self._database.transaction() as connection:
            upsert(connection, schema.clients, rows, update=["host_id", "device", "last_seen_at"])

    def clients(self, *, after: str = "", limit: int | None = None) -> list[ClientRow]:
        """Return all known clients, sorted by id, with their numbers of selections and inclusions
        in all runs.

        limit: maximum number of clients to return, among those that follow `after` in the
        database's own order; databases order text differently.
        """
        clients, quarantine = schema.clients, schema.quarantine
        page = (
            select(clients, quarantine.c.reason.label("quarantine"))
            .outerjoin(quarantine, quarantine.c.client_id == clients.c.client_id)
            .where(clients.c.client_id > after)
            .order_by(clients.c.client_id)
            .limit(limit)
        )
        with self._database.transaction() as connection:
            rows = read_rows(connection, page)
            if not rows:
                return []
            counts = _counts(connection, rows[0]["client_id"], rows[-1]["client_id"])
            found = [_client(row, counts.get(row["client_id"], (0, 0))) for row in rows]
        return found if limit else sorted(found, key=lambda client: client.client_id)

    def quarantine(self, client_id: str, reason: str, at: datetime) -> None:
        """Store that a client must not be selected. The client need not be known yet."""
        row = {
            "client_id": encode_text(client_id),
            "reason": encode_text(reason),
            "at": encode_time(at),
        }
        with self._database.transaction() as connection:
            upsert(connection, schema.quarantine, [row], update=["reason", "at"])

    def readmit(self, client_id: str) -> None:
        """Store that a client may be selected again. Raises NotFoundError if it is not in
        quarantine."""
        table, client_id = schema.quarantine, encode_text(client_id)
        with self._database.transaction() as connection:
            if (
                connection.execute(delete(table).where(table.c.client_id == client_id)).rowcount
                != 1
            ):
                there = sorted(connection.execute(select(table.c.client_id)).scalars())
                raise NotFoundError(
                    f"client {client_id!r} is not in quarantine; clients in quarantine: "
                    f"{', '.join(there) or 'none'}",
                    client=client_id,
                )

    def quarantined(self) -> list[QuarantineRow]:
        """Return the clients in quarantine, sorted by id."""
        with self._database.transaction() as connection:
            rows = read_rows(connection, select(schema.quarantine))
            found = [_read_quarantine(row) for row in rows]
        return sorted(found, key=lambda client: client.client_id)

    def leave_out(self, run_id: str, clients: Sequence[LeftOutRow]) -> None:
        """Store that clients can't take part in a run. A new reason replaces an earlier one."""
        rows = [
            {
                "run_id": run_id,
                "client_id": client.client_id,
                "process_id": encode_text(client.process_id),
                "trouble": encode_text(client.trouble),
                "at": encode_time(client.at),
            }
            for client in clients
        ]
        with self._database.transaction() as connection:
            upsert(connection, schema.left_out, rows, update=["process_id", "trouble", "at"])

    def let_in(self, run_id: str, clients: Sequence[str] | None = None) -> None:
        """Store that clients can take part in a run again; by default, all clients of the run."""
        table = schema.left_out
        statement = delete(table).where(table.c.run_id == run_id)
        with self._database.transaction() as connection:
            if clients is None:
                connection.execute(statement)
            elif clients:
                named = statement.where(table.c.client_id == bindparam("name"))
                connection.execute(named, [{"name": client} for client in clients])

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """Return the clients that are excluded from a run, sorted by id."""
        table = schema.left_out
        with self._database.transaction() as connection:
            query = select(table).where(table.c.run_id == run_id)
            found = [_read_left_out(row) for row in read_rows(connection, query)]
        return sorted(found, key=lambda client: client.client_id)


def _counts(connection: Connection, first: str, last: str) -> dict[str, tuple[int, int]]:
    """Return how often each client from id `first` to id `last` was selected and included."""
    members = schema.members
    included = case((members.c.state == MemberState.INCLUDED.value, 1), else_=0)
    query = (
        # PostgreSQL returns a decimal for a sum of 64-bit integers, so SUM is not used.
        select(members.c.client_id, func.count(), func.count().filter(included == 1))
        .where(members.c.client_id >= first, members.c.client_id <= last)
        .group_by(members.c.client_id)
    )
    return {client: (selected, taken) for client, selected, taken in connection.execute(query)}


def _client(row: Row, counts: tuple[int, int]) -> ClientRow:
    return _read_client(row, selected=counts[0], included=counts[1])
