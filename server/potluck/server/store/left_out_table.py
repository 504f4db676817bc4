"""The clients that can't take part in a run."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, delete, select

from potluck.server.store import schema
from potluck.server.store.part import Part, upsert
from potluck.server.store.records import LeftOutRow
from potluck.server.store.sql.column_types import (
    Reader,
    decode_time,
    encode_text,
    encode_time,
    read_rows,
)

_read_left_out = Reader(LeftOutRow, "left_out", ["run_id", "client_id"], {"at": decode_time})


class LeftOutRows(Part):
    """Who is left out of which run, and why."""

    def leave_out(self, run_id: str, clients: Sequence[LeftOutRow]) -> None:
        """Record that clients can't take part; later reasons win."""
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
        """Record that clients can take part again; without names, all."""
        table = schema.left_out
        statement = delete(table).where(table.c.run_id == run_id)
        with self._database.transaction() as connection:
            if clients is None:
                connection.execute(statement)
            elif clients:
                named = statement.where(table.c.client_id == bindparam("name"))
                connection.execute(named, [{"name": client} for client in clients])

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """The clients that are left out of a run, by id."""
        table = schema.left_out
        with self._database.transaction() as connection:
            query = select(table).where(table.c.run_id == run_id)
            found = [_read_left_out(row) for row in read_rows(connection, query)]
        return sorted(found, key=lambda client: client.client_id)
