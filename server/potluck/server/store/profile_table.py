"""The table of clients' profiles, each stored once and never deleted."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import insert, select

from potluck.common.errors import ProtocolError
from potluck.server.store.part import Part
from potluck.server.store.records import Profile
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    decode_json,
    decode_time,
    encode_time,
    read_rows,
)

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
    """Profiles, keyed by client, data epoch, signal and parameters."""

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
                    profile, "it disclosed something else before, and a disclosure is made once"
                )

    def profiles(
        self,
        *,
        signal: str | None = None,
        run_id: str | None = None,
        client_ids: Collection[str] | None = None,
    ) -> list[Profile]:
        """Return profiles, sorted by client, signal and data epoch.

        Each given argument limits the result: to one signal, to the clients of a run's roster, to
        these clients.
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
