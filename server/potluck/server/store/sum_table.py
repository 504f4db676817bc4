"""The tables of secure sums: the outcome of each session, and the certified sets of clients."""

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
    """Outcomes of sessions in order, and certificates, which are stored before clients send
    shares."""

    def keep_certificate(self, inputs: str, session_id: str, certificate: str) -> None:
        """Store the set that a session's clients certified, as JSON. inputs: identifies one input
        of the clients.

        Storing the certificate of the same session again changes nothing.
        """
        table = schema.sum_certificates
        with self._database.transaction() as connection:
            known = select(table.c.number).where(table.c.session_id == session_id)
            if connection.execute(known).first() is None:
                last = connection.execute(select(func.max(table.c.number))).scalar_one() or 0
                row = {
                    "number": last + 1,
                    "session_id": session_id,
                    "inputs": inputs,
                    "certificate": certificate,
                }
                connection.execute(insert(table), row)

    def certificates(self, inputs: str, *, limit: int) -> list[str]:
        """Return the newest certificates over these inputs as JSON, newest first."""
        table = schema.sum_certificates
        query = select(table.c.certificate).where(table.c.inputs == inputs)
        query = query.order_by(table.c.number.desc()).limit(limit)
        with self._database.transaction() as connection:
            return list(connection.execute(query).scalars())

    def add_sum(self, done: SecureSum) -> None:
        """Store the outcome of a session."""
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
        """Return the outcomes of all sessions, oldest first. run_id, kind: limit the result to one
        run or one kind."""
        table = schema.secure_sums
        query = select(table).order_by(table.c.number)
        if run_id is not None:
            query = query.where(table.c.run_id == run_id)
        if kind is not None:
            query = query.where(table.c.kind == kind)
        with self._database.transaction() as connection:
            return [_read_sum(row) for row in read_rows(connection, query)]
