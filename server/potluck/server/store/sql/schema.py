"""The tables of the newest schema. `migrations.py` converts older databases to it.

Only four types are used, which behave the same in SQLite and PostgreSQL: text, 64-bit integers,
doubles, and text with JSON. Times are ISO 8601 text in UTC with microseconds, so they sort by time,
and people can read them. Booleans are 0 and 1. A 64-bit unsigned seed does not fit into SQL's
integers, so it is stored as decimal text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

from potluck.common.trainer import Measured
from potluck.common.updates.update_report import UpdateReport
from potluck.server.store.sql.database import VERSION_TABLE

metadata = MetaData()


def _text(name: str, *, key: bool = False, null: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=key, nullable=null)


def _integer(name: str, *, key: bool = False, null: bool = False) -> Column[int]:
    # Without autoincrement=False, SQLAlchemy would make an integer key SERIAL; all keys are given.
    return Column(name, BigInteger, primary_key=key, nullable=null, autoincrement=False)


def _double(name: str, *, null: bool = False) -> Column[float]:
    return Column(name, Double, nullable=null)


def _reported() -> list[Column[Any]]:
    """Return a column for each number of an update's report."""
    makers: dict[Any, Callable[..., Column[Any]]] = {
        int: _integer,
        float: _double,
        float | None: _double,
        Mapping[str, float]: _text,
        Mapping[str, Measured]: _text,
    }
    kinds = get_type_hints(UpdateReport)
    return [makers[kind](name, null=True) for name, kind in kinds.items()]


_ATTEMPT = ["run_id", "round", "attempt"]

schema_version = Table(
    VERSION_TABLE, metadata, _integer("version", key=True), _text("software", null=True)
)
"""Table with one row. software: the build that last opened the database."""

runs = Table(
    "runs",
    metadata,
    _text("run_id", key=True),
    _integer("number"),
    _text("name"),
    _text("run_file"),
    _text("created_at"),
    _integer("rounds"),
    _integer("count"),
    _text("seed"),
    _text("task"),
    _text("selector"),
    _text("strategy"),
    _text("measures"),
    _text("state"),
    _text("reason"),
    _text("changed_at"),
    _text("initial_model_blake3", null=True),
    _text("initial_model_at", null=True),
    UniqueConstraint("number"),
    Index("runs_by_initial_model", "initial_model_blake3"),
    Index("runs_by_state", "state"),
)

roster = Table(
    "roster",
    metadata,
    _text("run_id", key=True),
    _integer("row", key=True),
    _text("client_id"),
    UniqueConstraint("run_id", "client_id"),
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

attempts = Table(
    "attempts",
    metadata,
    _text("run_id", key=True),
    _integer("round", key=True),
    _integer("attempt", key=True),
    _text("begun_at"),
    _text("available"),
    _text("state"),
    _text("reason"),
    _integer("spent"),
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

left_out = Table(
    "left_out",
    metadata,
    _text("run_id", key=True),
    _text("client_id", key=True),
    _text("process_id"),
    _text("trouble"),
    _text("at"),
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

exchanges = Table(
    "exchanges",
    metadata,
    _text("run_id", key=True),
    _integer("round", key=True),
    _integer("attempt", key=True),
    _integer("step", key=True),
    _text("question"),
    _text("answers", null=True),
    ForeignKeyConstraint(_ATTEMPT, [f"attempts.{name}" for name in _ATTEMPT]),
)

members = Table(
    "members",
    metadata,
    _text("run_id", key=True),
    _integer("round", key=True),
    _integer("attempt", key=True),
    _integer("position", key=True),
    _text("client_id"),
    _text("host_id"),
    _text("state"),
    _text("reason"),
    _text("trouble", null=True),
    _text("blake3", null=True),
    _integer("size", null=True),
    _text("encoding", null=True),
    _integer("delta", null=True),
    _integer("compressed", null=True),
    *_reported(),
    _text("quotas", null=True),
    _double("weight", null=True),
    _integer("epochs", null=True),
    _text("dropped", null=True),
    _integer("data_epoch", null=True),
    _text("software", null=True),
    UniqueConstraint("run_id", "round", "attempt", "client_id"),
    ForeignKeyConstraint(_ATTEMPT, [f"attempts.{name}" for name in _ATTEMPT]),
    # With this index, queries that count selections and inclusions by client need not read the
    # table.
    Index("members_by_client", "client_id", "state"),
)

late_updates = Table(
    "late_updates",
    metadata,
    _text("run_id", key=True),
    _integer("round", key=True),
    _text("client_id", key=True),
    _integer("attempt"),
    _text("state"),
    _text("model_blake3"),
    _double("seconds_left"),
    _integer("joined_round", null=True),
    _double("weight", null=True),
    _text("trouble", null=True),
    ForeignKeyConstraint(_ATTEMPT, [f"attempts.{name}" for name in _ATTEMPT]),
    Index("late_updates_by_state", "run_id", "state"),
    Index("late_updates_by_joined_round", "run_id", "joined_round"),
)

rounds = Table(
    "rounds",
    metadata,
    _text("run_id", key=True),
    _integer("round", key=True),
    _integer("attempt"),
    _text("model_blake3"),
    _text("state_blake3", null=True),
    _text("selector_scalars"),
    _text("strategy_scalars"),
    _text("metrics"),
    _text("spreads"),
    _double("seconds"),
    _integer("bytes_down"),
    _integer("bytes_up"),
    _text("committed_at"),
    _text("best_measure", null=True),
    _integer("best_round", null=True),
    _double("best_value", null=True),
    _double("best_mark", null=True),
    _integer("best_stalled", null=True),
    _text("software", null=True),
    _text("coverage", null=True),
    _text("privacy", null=True),
    ForeignKeyConstraint(_ATTEMPT, [f"attempts.{name}" for name in _ATTEMPT]),
    # Index for queries whether the file with a given digest may be deleted.
    Index("rounds_by_model", "model_blake3"),
    Index("rounds_by_state_file", "state_blake3"),
)

participation = Table(
    "participation",
    metadata,
    _text("run_id", key=True),
    _text("client_id", key=True),
    _integer("picks"),
    _integer("samples", null=True),
    _integer("included_round", null=True),
    _integer("included_attempt", null=True),
    ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
)

clients = Table(
    "clients",
    metadata,
    _text("client_id", key=True),
    _text("host_id"),
    _text("device"),
    _text("first_seen_at"),
    _text("last_seen_at"),
)

quarantine = Table(
    "quarantine",
    metadata,
    _text("client_id", key=True),
    _text("reason"),
    _text("at"),
)

profiles = Table(
    "profiles",
    metadata,
    _text("signal", key=True),
    _text("client_id", key=True),
    _integer("data_epoch", key=True),
    _text("parameters_json", key=True),
    _text("payload_json"),
    _text("signature", null=True),
    _text("received_at"),
)

sum_certificates = Table(
    "sum_certificates",
    metadata,
    _integer("number", key=True),
    _text("session_id"),
    _text("inputs"),
    _text("certificate"),
    UniqueConstraint("session_id"),
    Index("sum_certificates_by_inputs", "inputs"),
)

secure_sums = Table(
    "secure_sums",
    metadata,
    _integer("number", key=True),
    _text("session_id"),
    _text("run_id"),
    _text("kind"),
    _text("task"),
    _text("epochs"),
    _text("record"),
    _text("total", null=True),
    UniqueConstraint("session_id"),
)
