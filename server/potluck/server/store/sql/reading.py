"""A database that another process writes: opened to read, without the lock of a coordinator."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, NullPool, create_engine, event

from potluck.server.store.sql.database import Database, parse_url, shown_url

_BUSY_SECONDS = 10.0


def open_for_reading(url: str) -> Database:
    """A database in which nothing can be changed; a connection for each transaction.

    In between none is open: a reader of SQLite's keeps its log from being moved into the file.
    Raises ConfigurationError for a wrong URL; transactions raise StorageError.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(Path(parsed.database or "").resolve())
    engine = create_engine(
        parsed,
        poolclass=NullPool,
        connect_args={"connect_timeout": 10},
        isolation_level="REPEATABLE READ",  # all that a transaction reads is of one moment
    )

    @event.listens_for(engine, "connect")
    def read_only(connection: Any, _record: object) -> None:
        connection.read_only = True

    return Database(engine, shown_url(parsed), None)


def _open_sqlite(path: Path) -> Database:
    def connect() -> sqlite3.Connection:
        uri = f"file:{quote(str(path))}?mode=ro"
        # No isolation level: transactions are begun below.
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")  # all that it reads is of one moment

    return Database(engine, str(path), None)
