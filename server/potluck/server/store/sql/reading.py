"""Opens a database that another process writes: read-only, and without a coordinator's lock."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, NullPool, create_engine, event

from potluck.server.store.sql.database import Database, parse_url, shown_url

_BUSY_SECONDS = 10.0


def open_for_reading(url: str) -> Database:
    """Open a database read-only, with a new connection for each transaction.

    No connection stays open between transactions: an open reader would prevent SQLite's log from
    being moved into the file. Raises ConfigurationError for a wrong URL. Transactions raise
    StorageError.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(Path(parsed.database or "").resolve())
    engine = create_engine(
        parsed,
        poolclass=NullPool,
        connect_args={"connect_timeout": 10},
        isolation_level="REPEATABLE READ",  # a transaction reads one snapshot
    )

    @event.listens_for(engine, "connect")
    def read_only(connection: Any, _record: object) -> None:
        connection.read_only = True

    return Database(engine, shown_url(parsed), None)


def _open_sqlite(path: Path) -> Database:
    def connect() -> sqlite3.Connection:
        uri = f"file:{quote(str(path))}?mode=ro"
        # No isolation level: the code below starts transactions itself.
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")  # a transaction reads one snapshot

    return Database(engine, str(path), None)
