"""Reads and writes the members of cohorts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from potluck.server.store.part import of_attempt, upsert
from potluck.server.store.records import (
    AttemptKey,
    LateRow,
    MemberChange,
    MemberRow,
    MemberWork,
    Provenance,
    UpdateRow,
)
from potluck.server.store.sql import schema
from potluck.server.store.sql.column_types import (
    Reader,
    Row,
    decode_json,
    decode_names,
    decode_numbers,
    encode_json,
    encode_names,
    encode_numbers,
    encode_text,
    encode_value,
    read_rows,
)

_KEY = ["run_id", "round", "attempt", "position"]
_read_member = Reader(MemberRow, "members", _KEY)
_read_work = Reader(
    MemberWork,
    "members",
    _KEY,
    {
        "quotas": lambda value: decode_numbers(value) or (),
        "dropped": decode_names,
    },
)
_read_provenance = Reader(Provenance, "members", _KEY)
_read_update = Reader(
    UpdateRow,
    "members",
    _KEY,
    {
        "reports": lambda value: {} if value is None else decode_json(value),
        "measures": lambda value: {} if value is None else decode_json(value),
    },
)


def read_members(
    connection: Connection, where: ColumnElement[bool]
) -> dict[AttemptKey, list[MemberRow]]:
    """Return members by run, round and attempt, in the order chosen."""
    members = schema.members
    query = (
        select(members)
        .where(where)
        .order_by(members.c.run_id, members.c.round, members.c.attempt, members.c.position)
    )
    found: dict[AttemptKey, list[MemberRow]] = {}
    for row in read_rows(connection, query):
        key = AttemptKey(row["run_id"], row["round"], row["attempt"])
        found.setdefault(key, []).append(_member(row))
    return found


def member_values(change: MemberChange) -> dict[str, Any]:
    """Return the columns that a change sets. The columns of the update are included only if the
    change has an update."""
    trouble = None if change.trouble is None else encode_text(change.trouble)
    values: dict[str, Any] = {"state": change.state.value, "trouble": trouble}
    return values if change.update is None else values | update_values(change.update)


def update_values(update: UpdateRow) -> dict[str, Any]:
    """Return the column values of an update."""
    values: dict[str, Any] = {
        name: encode_value(value) for name, value in vars(update).items() if name != "measures"
    }
    sums = {name: vars(each) for name, each in update.measures.items()}
    return {**values, "measures": encode_json(sums)}


def take_part_late(connection: Connection, rows: Sequence[LateRow]) -> None:
    """Store which clients took part, by a late update, in the round that is being committed."""
    values = [
        {
            "run_id": row.run_id,
            "client_id": row.client_id,
            "picks": 0,
            "samples": None if row.update is None else row.update.samples or None,
            "included_round": row.round,
            "included_attempt": row.attempt,
        }
        for row in rows
    ]
    newest = ("samples", "included_round", "included_attempt")
    upsert(connection, schema.participation, values, update=newest, add=["picks"], keep_known=True)


def work_values(work: MemberWork) -> dict[str, Any]:
    """Return the column values of a member's work; NULL where the selector set nothing."""
    return {
        "quotas": encode_numbers(work.quotas or None),
        "weight": work.weight,
        "epochs": work.epochs,
        "dropped": encode_names(work.dropped or None),
    }


def provenance_values(provenance: Provenance) -> dict[str, Any]:
    """Return the column values of the versions that a host reported."""
    software = provenance.software
    return {
        "data_epoch": provenance.data_epoch,
        "software": None if software is None else encode_text(software),
    }


def take_part(connection: Connection, key: AttemptKey, included: Sequence[str]) -> None:
    """Store which clients took part in the round that is being committed. A resumed run reads these
    rows."""
    members, table = schema.members, schema.participation
    query = select(members.c.client_id, members.c.samples).where(of_attempt(members, key))
    in_model = set(included)
    rows = [
        {
            "run_id": key.run_id,
            "client_id": client_id,
            "picks": 1,
            # A masked update does not disclose its number of samples.
            "samples": (samples or None) if client_id in in_model else None,
            "included_round": key.round if client_id in in_model else None,
            "included_attempt": key.attempt if client_id in in_model else None,
        }
        for client_id, samples in connection.execute(query)
    ]
    newest = ("samples", "included_round", "included_attempt")
    upsert(connection, table, rows, update=newest, add=["picks"], keep_known=True)


def _member(row: Row) -> MemberRow:
    update = None if row["blake3"] is None else _read_update(row)
    return _read_member(row, update=update, work=_read_work(row), provenance=_read_provenance(row))
