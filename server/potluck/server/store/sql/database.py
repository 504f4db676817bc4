"""The database of one coordinator, with one connection. Converts all errors of SQLAlchemy."""

from __future__ import annotations

import fcntl
import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.settings.extras import not_installed
from potluck.server.store.sql.column_types import CorruptRowError
from potluck.server.store.sql.failures import (
    AFTER_DAMAGE,
    DamagedDatabaseError,
    DatabaseAwayError,
    UnreadableRowError,
    storage_error,
)

T = TypeVar("T")

# Time that SQLite waits for a lock; then the database counts as unreachable.
_BUSY_SECONDS = 3
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_TRANSACTION_NUMBER = text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")
# With these values, a lost server is detected within half a minute; the URL may set other values.
_CONNECTING = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_LOCK_SECONDS = 2
# Number of PostgreSQL's lock: "potluck" in ASCII. Every version of Potluck must use this number, so
# that two coordinators exclude each other.
_ADVISORY_LOCK = int.from_bytes(b"potluck")

VERSION_TABLE = "potluck_schema_version"
"""Name of the table whose only row has the version of the database's schema."""


class Database:
    """An engine with only one connection, which holds the lock that excludes other coordinators."""

    def __init__(self, engine: Engine, name: str, lock: int | None) -> None:
        self._engine = engine
        self._lock = lock
        self._given_up = threading.Event()
        self._away = ""
        self.name = name
        self.version: int | None = None
        """Version of the schema; None until it is known. New connections must find the same
        version."""
        self.tell_away: Callable[[str], None] = lambda _: None
        """Function called with the reason when the database becomes unreachable, and with "" when
        it is reachable again; from any thread."""
        self.tell_damaged: Callable[[str], None] = lambda _: None
        """Function called with the reason if the database is found to be damaged; from any
        thread."""

    @classmethod
    def open(cls, url: str) -> Database:
        """Connect and acquire the lock. Raises ConfigurationError for a wrong URL, StorageError for
        all other failures."""
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _open_sqlite(parsed)
        return _open_postgresql(parsed)

    def close(self) -> None:
        """Disconnect and release the lock."""
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run a transaction: commit at the end of the block, or change nothing. Raises
        StorageError.

        If the connection is lost during a commit, the new connection finds out whether the commit
        succeeded, however long that takes. A DatabaseAwayError therefore means that nothing has
        changed.
        """
        number: int | None = None
        try:
            with self._engine.begin() as connection:
                yield connection
                number = _transaction_number(connection)
        except CorruptRowError as error:
            raise UnreadableRowError(
                f"{self.name}: {error}; restore the database from a backup", database=self.name
            ) from error
        # SQLAlchemy does not convert a driver's error if a number exceeds 64 bits or a text is
        # invalid.
        except (SQLAlchemyError, OverflowError, UnicodeError) as error:
            failed = storage_error(error, self.name)
            if isinstance(failed, DamagedDatabaseError):
                self.tell_damaged(failed.message)
            away = isinstance(failed, DatabaseAwayError)
            if not away or number is None or not self._was_committed(number):
                raise failed from error

    def patiently(self, call: Callable[[], T]) -> T:
        """Call a function; repeat the call while the database is unreachable, until `give_up` is
        called.

        Other errors of the function are raised.
        """
        for attempt in itertools.count(1):
            try:
                result = call()
            except DatabaseAwayError as error:
                self._note_away(error.message)
                if self._given_up.wait(pause_seconds(attempt)):
                    raise
            else:
                self._note_away("")
                return result
        raise AssertionError("unreachable: counting never ends")

    def checkpoint(self) -> bool:
        """Move the content of SQLite's log into the database file, so that damage to the log can't
        undo it.

        Return False if another program that reads the file prevents this. Raises StorageError.
        """
        if self._engine.dialect.name != "sqlite":
            return True  # PostgreSQL manages its log itself
        try:
            connection = self._engine.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute("PRAGMA busy_timeout = 0")
                # The mode must truncate the log. Otherwise SQLite would still apply the beginning
                # of a damaged log, and overwrite new pages with old ones.
                [busy, _, _] = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                cursor.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
                cursor.close()
            finally:
                connection.close()
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise storage_error(error, self.name) from error
        return not busy

    def check(self, *, quickly: bool = False) -> None:
        """Check the whole SQLite file. Raises DamagedDatabaseError. quickly: True to skip the
        indexes."""
        if self._engine.dialect.name != "sqlite":
            return  # PostgreSQL checks its files itself
        pragma = "PRAGMA quick_check(1)" if quickly else "PRAGMA integrity_check(1)"
        with self.transaction() as connection:
            damage = connection.exec_driver_sql(pragma).scalar_one()
        if damage != "ok":
            raise _damaged(self.name, str(damage))

    def look(self) -> None:
        """Check a part of the SQLite file, for at most 0.25 s; call `tell_damaged` if the file is
        damaged.

        It uses a separate connection, which has no pages in memory. Thread-safe.
        """
        if self._engine.dialect.name != "sqlite":
            return
        end = time.monotonic() + _LOOK_SECONDS
        try:
            with closing(sqlite3.connect(f"file:{quote(self.name)}?mode=ro", uri=True)) as reader:
                reader.execute("PRAGMA busy_timeout = 0").close()
                reader.set_progress_handler(lambda: int(time.monotonic() > end), 1000)
                [damage] = reader.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            failed: StorageError | None = storage_error(error, self.name)
        else:
            failed = None if damage == "ok" else _damaged(self.name, str(damage))
        if isinstance(failed, DamagedDatabaseError):
            self.tell_damaged(failed.message)

    def give_up(self) -> None:
        """Stop waiting for an unreachable database. Thread-safe."""
        self._given_up.set()

    def _note_away(self, why: str) -> None:
        if bool(why) != bool(self._away):
            self._away = why
            self.tell_away(why)

    def _was_committed(self, number: int) -> bool:
        return self.patiently(lambda: self._is_committed(number))

    def _is_committed(self, number: int) -> bool:
        """Return True if the transaction with this number, whose outcome is unknown, was
        committed."""
        query = text("SELECT pg_xact_status(CAST(CAST(:number AS text) AS xid8))")
        with self.transaction() as connection:
            status = connection.execute(query, {"number": str(number)}).scalar_one()
        if status == "in progress":
            raise DatabaseAwayError(
                f"{self.name}: a commit is still running in a disconnected session; wait for it",
                database=self.name,
            )
        if status is None:
            raise StorageError(
                f"{self.name}: the database server can't report whether the last change was "
                "committed; restart the coordinator, which then continues from the stored state",
                database=self.name,
            )
        return str(status) == "committed"


def _damaged(database: str, damage: str) -> DamagedDatabaseError:
    detail = " ".join(damage.split())
    return DamagedDatabaseError(
        f"{database}: the file is damaged ({detail}); {AFTER_DAMAGE}", database=database
    )


def pause_seconds(attempt: int) -> float:
    """Return the seconds to wait after failed attempt number `attempt`, from 1."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 30))


def _transaction_number(connection: Connection) -> int | None:
    """Return PostgreSQL's number of the transaction. Return None in SQLite, and if the transaction
    changes nothing."""
    if connection.dialect.name != "postgresql":
        return None
    number = connection.execute(_TRANSACTION_NUMBER).scalar_one()
    return None if number is None else int(number)


def parse_url(url: str) -> URL:
    """Parse the URL of a supported database. Raises ConfigurationError."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigurationError(
            "the database URL can't be read; write sqlite:////var/lib/potluck/potluck.db or "
            "postgresql+psycopg://user@host/name"
        ) from error
    shown = shown_url(parsed)
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:") or parsed.query:
            raise ConfigurationError(
                f"database {shown}: the URL must contain only a file, as in "
                "sqlite:////path/to/file",
                url=shown,
            )
        return parsed
    if parsed.drivername in ("postgresql", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigurationError(
        f"database {shown}: {parsed.drivername!r} is not supported; use sqlite or "
        "postgresql+psycopg",
        url=shown,
    )


def shown_url(url: URL) -> str:
    """Return a URL as text, without the password in its user info or query."""
    if "password" in url.query:
        url = url.update_query_dict({"password": "***"})
    return url.render_as_string(hide_password=True)


def _engine(url: URL, name: str, **options: Any) -> Engine:
    # Only one connection, because PostgreSQL's lock belongs to the connection that writes.
    try:
        return create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0, **options)
    except (NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(
            f"database {name}: {not_installed('its driver', 'potluck[postgresql]')} ({error})",
            url=name,
        ) from error


def _open_sqlite(url: URL) -> Database:
    # The path is resolved, so that two paths to the same file use the same lock.
    path = Path(url.database or "").resolve()
    name = str(path)
    lock = _lock_file(path)
    try:
        # The file is created before SQLite does it, so that no other user can read it or its log.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        engine = _engine(url.set(database=name), name, connect_args={"timeout": _BUSY_SECONDS})
    except OSError as error:
        os.close(lock)
        raise _unopened(path, error) from error

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        try:
            connection.isolation_level = None  # transactions are begun explicitly, below
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}").close()
        except BaseException:
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE: a transaction that starts with a read must get the write lock at once.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    database = Database(engine, name, lock)
    try:
        database.check(quickly=True)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def locked_sqlite(path: Path) -> Iterator[None]:
    """Lock a SQLite file so that no coordinator can open it. Raises StorageError if a coordinator
    uses it."""
    lock = _lock_file(path)
    try:
        yield
    finally:
        os.close(lock)


def _lock_file(path: Path) -> int:
    """Lock a file next to the database; return its descriptor. Closing the descriptor releases the
    lock."""
    beside = path.with_name(path.name + ".lock")
    try:
        lock = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unopened(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        holder = os.read(lock, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StorageError(
            f"{path} is in use by another coordinator (process {holder}); stop that process, or "
            "give this coordinator another database",
            database=path,
            process=holder,
        ) from error
    except OSError as error:
        os.close(lock)
        raise _unopened(path, error) from error
    return lock


def _unopened(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: can't be opened ({error.strerror}); check that its directory exists, is "
        "writable and has space",
        database=path,
    )


def _check_version(connection: Any, database: Database) -> None:
    """Raise StorageError if the version of the schema has changed while the database was
    unreachable."""
    [version] = connection.execute(f"SELECT version FROM {VERSION_TABLE}").fetchone()  # noqa: S608  # a constant
    if version != database.version:
        raise StorageError(
            f"{database.name}: its schema version has changed from {database.version} to "
            f"{version}; restart the coordinator with the matching software",
            database=database.name,
            version=version,
        )


def _open_postgresql(url: URL) -> Database:
    name = shown_url(url)
    # pre-ping: after a restart of the server, the next transaction uses a new connection.
    connecting = {key: value for key, value in _CONNECTING.items() if key not in url.query}
    engine = _engine(url, name, pool_pre_ping=True, connect_args=connecting)

    @event.listens_for(engine, "connect")
    def lock(connection: Any, _record: object) -> None:
        # The lock belongs to the session, so it ends with this process. The server may need a
        # moment to notice the end of a killed coordinator's session, so acquiring it is retried.
        try:
            connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
            connection.execute("SELECT pg_advisory_lock(%s)", (_ADVISORY_LOCK,))
            if database.version is not None:
                _check_version(connection, database)
            connection.commit()
        except BaseException:
            connection.close()
            raise

    database = Database(engine, name, None)
    try:
        with database.transaction():
            pass
    except BaseException:
        database.close()
        raise
    return database
