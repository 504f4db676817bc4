"""Base class of the store's parts, and statements that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Insert, Table, and_, bindparam, func
from sqlalchemy.dialects import postgresql, sqlite

from potluck.common.errors import StorageError
from potluck.server.store.records import AttemptKey
from potluck.server.store.sql.database import Database


class Part:
    """Base class of the store's parts; each has the methods for some tables.

    Call the methods from one thread at a time; each may block.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def _refusal(self, message: str, **metadata: object) -> StorageError:
        """Return the error for a change that contradicts stored rows."""
        return StorageError(f"{self._database.name}: {message}", **metadata)


def of_attempt(table: Table, key: AttemptKey) -> ColumnElement[bool]:
    """Return the condition for the rows of one attempt in a table."""
    return and_(
        table.c.run_id == key.run_id, table.c.round == key.round, table.c.attempt == key.attempt
    )


def of_some_attempt(table: Table) -> ColumnElement[bool]:
    """Return the condition for the rows of an attempt, with parameters instead of values.

    `attempt_parameters` gives the values. This is for statements that are built once and executed
    often: in SQLite, building one takes longer than executing it.
    """
    return and_(*(table.c[name] == bindparam(f"key_{name}") for name in AttemptKey._fields))


def attempt_parameters(key: AttemptKey) -> dict[str, Any]:
    """Return the values of an attempt for a statement with `of_some_attempt`."""
    return {f"key_{name}": value for name, value in key._asdict().items()}


def upsert(
    connection: Connection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    update: Sequence[str],
    add: Sequence[str] = (),
    keep_known: bool = False,
) -> None:
    """Insert rows. If a row with the primary key exists already, set its `update` columns.

    add: columns whose new values are added to the stored ones. keep_known: True if None does not
    replace a stored value.
    """
    if rows:
        statement = _upsert(
            connection.dialect.name, table, tuple(update), tuple(add), keep_known=keep_known
        )
        connection.execute(statement, list(rows))


@lru_cache(maxsize=100)
def _upsert(
    dialect: str, table: Table, update: tuple[str, ...], add: tuple[str, ...], *, keep_known: bool
) -> Insert:
    # SQLite and PostgreSQL have the same ON CONFLICT syntax, but SQLAlchemy has no common function.
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert(table)
    new = statement.excluded
    changes: dict[str, ColumnElement[Any]] = {
        column: func.coalesce(new[column], table.c[column]) if keep_known else new[column]
        for column in update
    }
    changes |= {column: table.c[column] + new[column] for column in add}
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key.columns), set_=changes
    )
