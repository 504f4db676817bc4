"""One database, one connection, one coordinator; every error of SQLAlchemy ends here."""

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

# How long SQLite waits for a lock before the file counts as away, which is waited for as well.
_BUSY_SECONDS = 3
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
_TRANSACTION_NUMBER = text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)")
# A server that is gone without a word is noticed within half a minute; the URL may say otherwise.
_CONNECTING = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_LOCK_SECONDS = 2
# Any constant does, as long as every version of Potluck uses this one; it spells "potluck".
_ADVISORY_LOCK = int.from_bytes(b"potluck")

VERSION_TABLE = "potluck_schema_version"
"""Its one row holds the version of the database's schema."""


class Database:
    """An engine whose only connection holds the lock that keeps other coordinators out."""

    def __init__(self, engine: Engine, name: str, lock: int | None) -> None:
        self._engine = engine
        self._lock = lock
        self._given_up = threading.Event()
        self._away = ""
        self.name = name
        self.version: int | None = None
        """Version of the schema, once known. New connections must find the same version."""
        self.tell_away: Callable[[str], None] = lambda _: None
        """Called with the reason why the database is away, "" when it is back; in any thread."""
        self.tell_damaged: Callable[[str], None] = lambda _: None
        """Called with the reason if the database is found to be damaged; in any thread."""

    @classmethod
    def open(cls, url: str) -> Database:
        """Connect and lock. Raises ConfigurationError for a wrong URL, StorageError otherwise."""
        parsed = parse_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _open_sqlite(parsed)
        return _open_postgresql(parsed)

    def close(self) -> None:
        """Disconnect and let others in."""
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All of it is committed at the end, or nothing. Raises StorageError.

        A commit whose answer gets lost with the connection is looked up on the next one, however
        long that takes: a DatabaseAwayError means that nothing has changed.
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
        # SQLAlchemy lets through what drivers say of numbers wider than 64 bits and of text that
        # is not Unicode.
        except (SQLAlchemyError, OverflowError, UnicodeError) as error:
            failed = storage_error(error, self.name)
            if isinstance(failed, DamagedDatabaseError):
                self.tell_damaged(failed.message)
            away = isinstance(failed, DatabaseAwayError)
            if not away or number is None or not self._was_committed(number):
                raise failed from error

    def patiently(self, call: Callable[[], T]) -> T:
        """Call, again and again while the database is away, until `give_up`.

        Raises what the call raises of other errors.
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
        raise AssertionError("counting never ends")

    def checkpoint(self) -> bool:
        """Move the content of SQLite's log into the file, so that damage to the log can't undo it.

        Return False if another reader of the file prevents it. Raises StorageError.
        """
        if self._engine.dialect.name != "sqlite":
            return True  # PostgreSQL looks after its log
        try:
            connection = self._engine.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute("PRAGMA busy_timeout = 0")
                # Not a mode that leaves the log as it is: of a damaged one the beginning would
                # still count, and with it old pages in the place of new ones.
                [busy, _, _] = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                cursor.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
                cursor.close()
            finally:
                connection.close()
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise storage_error(error, self.name) from error
        return not busy

    def check(self, *, quickly: bool = False) -> None:
        """Read all of SQLite's file, quickly without its indexes. Raises DamagedDatabaseError."""
        if self._engine.dialect.name != "sqlite":
            return  # PostgreSQL looks after its files
        pragma = "PRAGMA quick_check(1)" if quickly else "PRAGMA integrity_check(1)"
        with self.transaction() as connection:
            damage = connection.exec_driver_sql(pragma).scalar_one()
        if damage != "ok":
            raise _damaged(self.name, str(damage))

    def look(self) -> None:
        """Read some of SQLite's file, with a connection of its own that has nothing in memory, for
        a quarter of a second at most; `tell_damaged` hears of damage. May be called by any thread.
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
        """Wait no more for a database that is away. May be called by any thread."""
        self._given_up.set()

    def _note_away(self, why: str) -> None:
        if bool(why) != bool(self._away):
            self._away = why
            self.tell_away(why)

    def _was_committed(self, number: int) -> bool:
        return self.patiently(lambda: self._is_committed(number))

    def _is_committed(self, number: int) -> bool:
        """True if a transaction was committed whose end was not heard of."""
        query = text("SELECT pg_xact_status(CAST(CAST(:number AS text) AS xid8))")
        with self.transaction() as connection:
            status = connection.execute(query, {"number": str(number)}).scalar_one()
        if status == "in progress":
            raise DatabaseAwayError(
                f"{self.name}: a commit is under way in a session that is cut off; wait for it",
                database=self.name,
            )
        if status is None:
            raise StorageError(
                f"{self.name}: the server does not know any more whether the last change was made; "
                "start the coordinator again, it goes on from what is there",
                database=self.name,
            )
        return str(status) == "committed"


def _damaged(database: str, damage: str) -> DamagedDatabaseError:
    detail = " ".join(damage.split())
    return DamagedDatabaseError(
        f"{database}: the file is damaged ({detail}); {AFTER_DAMAGE}", database=database
    )


def pause_seconds(attempt: int) -> float:
    """Pause before the next attempt to reach a database, after the `attempt`-th, from 1."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 30))


def _transaction_number(connection: Connection) -> int | None:
    """Return PostgreSQL's number of the transaction; None if it changes nothing, and in SQLite."""
    if connection.dialect.name != "postgresql":
        return None
    number = connection.execute(_TRANSACTION_NUMBER).scalar_one()
    return None if number is None else int(number)


def parse_url(url: str) -> URL:
    """The URL of a database that can be used. Raises ConfigurationError."""
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
                f"database {shown}: name a file and nothing else, as in sqlite:////path/to/file",
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
    """A URL without its password, wherever that stands."""
    if "password" in url.query:
        url = url.update_query_dict({"password": "***"})
    return url.render_as_string(hide_password=True)


def _engine(url: URL, name: str, **options: Any) -> Engine:
    # One connection: the lock, where it is PostgreSQL's, belongs to the connection that writes.
    try:
        return create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0, **options)
    except (NoSuchModuleError, ImportError) as error:
        raise ConfigurationError(
            f"database {name}: {not_installed('its driver', 'potluck[postgresql]')} ({error})",
            url=name,
        ) from error


def _open_sqlite(url: URL) -> Database:
    # Resolved, so that two ways to one file lead to one lock.
    path = Path(url.database or "").resolve()
    name = str(path)
    lock = _lock_file(path)
    try:
        # Created before SQLite would, so that no other user can read it or its log.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        engine = _engine(url.set(database=name), name, connect_args={"timeout": _BUSY_SECONDS})
    except OSError as error:
        os.close(lock)
        raise _unopened(path, error) from error

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: object) -> None:
        try:
            connection.isolation_level = None  # we begin transactions ourselves, below
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                connection.execute(f"PRAGMA {pragma}").close()
        except BaseException:
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # IMMEDIATE: a transaction that reads before it writes must not lose its turn to write.
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
    """Keep coordinators away from a database file. Raises StorageError while one has it."""
    lock = _lock_file(path)
    try:
        yield
    finally:
        os.close(lock)


def _lock_file(path: Path) -> int:
    """Lock a file beside the database, for as long as the descriptor is open."""
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
            f"{path}: in use by another coordinator (process {holder}); stop it, or give this "
            "one another database",
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
    """Raise StorageError if the schema was changed while the database was unreachable."""
    [version] = connection.execute(f"SELECT version FROM {VERSION_TABLE}").fetchone()  # noqa: S608  # a constant
    if version != database.version:
        raise StorageError(
            f"{database.name}: its schema is version {version} now, it was {database.version}; "
            "start the coordinator again with the software that it belongs to",
            database=database.name,
            version=version,
        )


def _open_postgresql(url: URL) -> Database:
    name = shown_url(url)
    # pre-ping: after the server was restarted, the next transaction finds a new connection.
    connecting = {key: value for key, value in _CONNECTING.items() if key not in url.query}
    engine = _engine(url, name, pool_pre_ping=True, connect_args=connecting)

    @event.listens_for(engine, "connect")
    def lock(connection: Any, _record: object) -> None:
        # A lock of the session, so it is gone as soon as this process is. The server may take a
        # moment to notice that a killed coordinator's session is over; hence the patience.
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
