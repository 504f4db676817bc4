"""Converts database errors to one line for operators, with cause and remedy."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from potluck.common.errors import StorageError

AFTER_DAMAGE = "restore it from a backup, or run `potluck-server rebuild`"
"""Remedy for a damaged SQLite file."""

# Prefix of SQLite's error name or of PostgreSQL's SQLSTATE → (cause, remedy).
_MEANINGS = {
    "SQLITE_FULL": ("the disk is full", "free some space"),
    "SQLITE_READONLY": ("the file is read-only", "make it and its directory writable"),
    "SQLITE_CORRUPT": ("the file is damaged", AFTER_DAMAGE),
    "SQLITE_NOTADB": ("the file is damaged or no database", AFTER_DAMAGE),
    "SQLITE_BUSY": ("another program has locked it", "stop that program"),
    "SQLITE_LOCKED": ("another program has locked it", "stop that program"),
    "SQLITE_IOERR": ("the disk failed", "check the disk"),
    "SQLITE_CANTOPEN": (
        "the file can't be opened",
        "check that its directory exists and who owns it",
    ),
    "SQLITE_PERM": ("access is denied", "check who owns the file"),
    "SQLITE_AUTH": ("access is denied", "check who owns the file"),
    "SQLITE_CONSTRAINT": ("it refused a row that breaks a rule", "please report this as a bug"),
    "53100": ("the server's disk is full", "free some space"),
    "53": ("the server is out of resources", "see its log"),
    "25006": ("it is read-only", "use the primary server"),
    "28": ("the server refused the user", "check user and password in the URL"),
    "3D": ("the server knows no such database", "create it with `createdb`"),
    "42501": ("the user may not do this", "make the user owner of the database"),
    "XX": ("the database is damaged", "see the server's log, restore it from a backup"),
    "58": ("the server's disk failed", "see its log"),
    "55P03": ("in use by another coordinator", "stop it, or give this one another database"),
    "57P": ("the server shut down", "start it and try again"),
    "08": ("the connection broke", "check that the server is up"),
    "23": ("it refused a row that breaks a rule", "please report this as a bug"),
}
# Errors that disappear after a while: the server restarts, has too many connections, or has not
# noticed the end of the session that held the lock; or another program has locked SQLite's file.
_AWAY = ("57P", "08", "53300", "55P03", "SQLITE_BUSY")
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "XX")
# psycopg has no error code for a refused connection, only the message.
_REFUSALS = ("does not exist", "authentication failed", "pg_hba.conf", "permission denied")
_UNREACHABLE = ("the connection failed", "check the URL and that the server is up")
_UNKNOWN = ("the database refused", "see the cause")


class DatabaseAwayError(StorageError):
    """The database is unreachable, and nothing in it has changed; waiting may help."""


class DamagedDatabaseError(StorageError):
    """The database is damaged; none of its content is reliable."""


class UnreadableRowError(StorageError):
    """A row is damaged; other rows can be read."""


def storage_error(error: Exception, database: str) -> StorageError:
    """Convert an error of SQLAlchemy or of a driver. database: name of the database in the
    message."""
    origin: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        origin = error.orig
    code = getattr(origin, "sqlite_errorname", None) or getattr(origin, "sqlstate", None)
    if code is not None:
        prefixes = [prefix for prefix in _MEANINGS if str(code).startswith(prefix)]
        # The longest matching prefix is the most specific.
        cause, remedy = _MEANINGS[max(prefixes, key=len)] if prefixes else _UNKNOWN
    elif isinstance(error, SQLAlchemyError) and type(origin).__module__.startswith("psycopg"):
        cause, remedy = _UNREACHABLE
    else:
        cause, remedy = _UNKNOWN
    detail = " ".join(str(origin).split())
    kind = StorageError
    if _is_away(code, cause, detail):
        kind = DatabaseAwayError
    elif str(code).startswith(_DAMAGED):
        kind = DamagedDatabaseError
    return kind(f"{database}: {cause} ({detail}); {remedy}", database=database)


def _is_away(code: object, cause: str, detail: str) -> bool:
    if code is not None:
        return str(code).startswith(_AWAY)
    return cause == _UNREACHABLE[0] and not any(words in detail for words in _REFUSALS)
