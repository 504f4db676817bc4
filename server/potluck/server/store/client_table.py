"""The tables of known clients, clients in quarantine, excluded clients, profiles and secure
sums."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, case, delete, func, insert, select

from potluck.common.errors import NotFoundError, ProtocolError
from potluck.server.store.part import Part, upsert
from potluck.server.store.records import (
    ClientRow,
    ClientSeen,
    LeftOutRow,
    MemberState,
    Profile,
    QuarantineRow,
    SecureSum,
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
    read_rows,
)

# Clients ------------------------------------------------------------------------------------------

_read_client = Reader(
    ClientRow, "clients", ["client_id"], {"first_seen_at": decode_time, "last_seen_at": decode_time}
)
_read_quarantine = Reader(QuarantineRow, "quarantine", ["client_id"], {"at": decode_time})
_read_left_out = Reader(LeftOutRow, "left_out", ["run_id", "client_id"], {"at": decode_time})


class Clients(Part):
    """Stores the clients' times of last contact, the quarantine, and the clients excluded from each
    run."""

    def see_clients(self, seen: Sequence[ClientSeen]) -> None:
        """Store the times at which clients were in contact, all in one transaction. An earlier time
        does not replace a later one."""
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
        """Put a client into quarantine, so that no run selects it. The client need not be known
        yet."""
        row = {
            "client_id": encode_text(client_id),
            "reason": encode_text(reason),
            "at": encode_time(at),
        }
        with self._database.transaction() as connection:
            upsert(connection, schema.quarantine, [row], update=["reason", "at"])

    def readmit(self, client_id: str) -> None:
        """Remove a client from quarantine. Raises NotFoundError if it is not in quarantine."""
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
        """Record clients that can't take part in a run. A new reason replaces an earlier one."""
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
        """Record that these clients can take part in a run again; by default, all clients of the
        run."""
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

    def troubles(self, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return why clients are excluded from these runs, by run and client, both sorted."""
        table = schema.left_out
        query = (
            select(table.c.run_id, table.c.client_id, table.c.trouble)
            .where(table.c.run_id.in_(run_ids))
            .order_by(table.c.run_id, table.c.client_id)
        )
        found: dict[str, dict[str, str]] = {}
        with self._database.transaction() as connection:
            for row in read_rows(connection, query):
                found.setdefault(str(row["run_id"]), {})[str(row["client_id"])] = str(
                    row["trouble"]
                )
        return found


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


# Profiles -----------------------------------------------------------------------------------------

_KEY = ["signal", "client_id", "data_epoch", "parameters_json"]


def _json_text(value: object) -> object:
    decode_json(value)
    return value


def _signature(value: object) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a valid signature")
    return bytes.fromhex(value)


_read_profile = Reader(
    Profile,
    "profiles",
    _KEY,
    {
        "parameters_json": _json_text,
        "payload_json": _json_text,
        "signature": _signature,
        "received_at": decode_time,
    },
)


class Profiles(Part):
    """Stores profiles, keyed by client, data epoch, signal and parameters."""

    def put_profile(self, profile: Profile) -> None:
        """Store a profile. If the same content is stored already, nothing changes, not even the
        time.

        Raises ProtocolError if other content is stored under the same key, or if the content is not
        JSON.
        """
        row = {
            "signal": profile.signal,
            "client_id": profile.client_id,
            "data_epoch": profile.data_epoch,
            "parameters_json": profile.parameters_json,
            "payload_json": profile.payload_json,
            "signature": None if profile.signature is None else profile.signature.hex(),
            "received_at": encode_time(profile.received_at),
        }
        for column in ("parameters_json", "payload_json"):
            try:
                decode_json(row[column])
            except ValueError as error:
                raise self._disagreement(profile, f"{column} is not JSON: {error}") from error
        table = schema.profiles
        query = select(table).where(*(table.c[column] == row[column] for column in _KEY))
        with self._database.transaction() as connection:
            kept = read_rows(connection, query)
            if not kept:
                connection.execute(insert(table), row)
            elif any(kept[0][column] != row[column] for column in ("payload_json", "signature")):
                raise self._disagreement(
                    profile,
                    "the client disclosed a different payload before, and a disclosure can "
                    "be made only once",
                )

    def profiles(
        self,
        *,
        signal: str | None = None,
        run_id: str | None = None,
        client_ids: Collection[str] | None = None,
    ) -> list[Profile]:
        """Return profiles, sorted by client, signal and data epoch.

        Each given argument limits the result: to one signal, to the clients of a run's roster, or
        to the clients with these ids.
        """
        table, roster = schema.profiles, schema.roster
        query = select(table)
        if signal is not None:
            query = query.where(table.c.signal == signal)
        if run_id is not None:
            query = query.join(
                roster, (roster.c.run_id == run_id) & (roster.c.client_id == table.c.client_id)
            )
        if client_ids is not None:
            query = query.where(table.c.client_id.in_(list(client_ids)))
        with self._database.transaction() as connection:
            found = [_read_profile(row) for row in read_rows(connection, query)]
        return sorted(
            found,
            key=lambda each: (each.client_id, each.signal, each.data_epoch, each.parameters_json),
        )

    def _disagreement(self, profile: Profile, why: str) -> ProtocolError:
        return ProtocolError(
            f"client {profile.client_id}: {profile.signal} of data epoch {profile.data_epoch} "
            f"refused: {why}",
            client=profile.client_id,
            signal=profile.signal,
            data_epoch=profile.data_epoch,
        )


# Secure sums --------------------------------------------------------------------------------------


def _counts_of_sum(value: object) -> object:
    return None if value is None else tuple(decode_json(value))


_read_sum = Reader(
    SecureSum,
    "secure_sums",
    ["session_id"],
    {"record": decode_json, "epochs": decode_json, "total": _counts_of_sum},
)


class Sums(Part):
    """Stores the outcomes of secure-sum sessions, and the sets that clients certified, which must
    be stored before clients send shares."""

    def keep_certificate(self, inputs: str, session_id: str, certificate: str) -> None:
        """Store the set that a session's clients certified, as JSON. inputs: text that is equal for
        all sums that may have the same inputs of clients.

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
