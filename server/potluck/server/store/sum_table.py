"""Secure sums: what came of each session, and the log of those that were released."""

from __future__ import annotations

from sqlalchemy import func, insert, select

from potluck.server.store.part import Part
from potluck.server.store.records import SecureSum
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import Reader, decode_json, encode_json, read_rows


def _counts(value: object) -> object:
    return None if value is None else tuple(decode_json(value))


_read_sum = Reader(
    SecureSum,
    "secure_sums",
    ["session_id"],
    {"record": decode_json, "epochs": decode_json, "total": _counts},
)


class Sums(Part):
    """The ends of sessions in their order, and the query log, which is only ever extended."""

    def append_query_log(self, session_id: str, entry: bytes) -> None:
        """Extend the log. The same session again changes nothing."""
        table = schema.query_log
        with self._database.transaction() as connection:
            known = select(table.c.number).where(table.c.session_id == session_id)
            if connection.execute(known).first() is None:
                last = connection.execute(select(func.count()).select_from(table)).scalar_one()
                row = {"number": last + 1, "session_id": session_id, "entry": entry.hex()}
                connection.execute(insert(table), row)

    def query_log(self) -> list[bytes]:
        """All entries, oldest first."""
        table = schema.query_log
        with self._database.transaction() as connection:
            rows = read_rows(connection, select(table).order_by(table.c.number))
        return [bytes.fromhex(row["entry"]) for row in rows]

    def add_sum(self, done: SecureSum) -> None:
        """Keep what came of a session."""
        table = schema.secure_sums
        row = {
            "session_id": done.session_id,
            "run_id": done.run_id,
            "kind": done.kind,
            "task": done.task,
            "epochs": encode_json(done.epochs),
            "record": encode_json(done.record),
            "total": None if done.total is None else str(list(done.total)),
        }
        with self._database.transaction() as connection:
            last = connection.execute(select(func.count()).select_from(table)).scalar_one()
            connection.execute(insert(table), {"number": last + 1, **row})

    def sums(self, *, run_id: str | None = None, kind: str | None = None) -> list[SecureSum]:
        """The outcomes of all sessions, oldest first; of one run, of one kind, where given."""
        table = schema.secure_sums
        query = select(table).order_by(table.c.number)
        if run_id is not None:
            query = query.where(table.c.run_id == run_id)
        if kind is not None:
            query = query.where(table.c.kind == kind)
        with self._database.transaction() as connection:
            return [_read_sum(row) for row in read_rows(connection, query)]
