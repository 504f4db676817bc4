"""A backup on disk: a folder with the database, files of the state directory, and a list of them.

backup.json       list of the files with their digests potluck.sqlite3   the database; or
potluck.dump, of PostgreSQL state/            files of the state directory, as they lie there
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy import URL

from potluck.common.disk import sync_data
from potluck.common.errors import ConfigurationError, StorageError, disk_error
from potluck.server.store.sql.database import parse_url, shown_url
from potluck.server.store.sql.schema import metadata

# Dumps of PostgreSQL ------------------------------------------------------------------------------


def dump(url: str, path: Path) -> None:
    """Dump the coordinator's tables of a PostgreSQL database into a file.

    Tables of other programs in the same database are not dumped, so a restore does not touch them.
    Raises ConfigurationError, StorageError.
    """
    tables = [f"--table={name}" for name in sorted(metadata.tables)]
    _run(parse_url(url), "pg_dump", "--format=custom", "--no-owner", f"--file={path}", *tables)


def put_back(url: str, path: Path) -> None:
    """Replace the coordinator's tables in a PostgreSQL database by those of a dump, in one
    transaction.

    Raises ConfigurationError, StorageError.
    """
    options = ("--clean", "--if-exists", "--no-owner", "--single-transaction", "--exit-on-error")
    _run(parse_url(url), "pg_restore", *options, str(path))


def _run(parsed: URL, program: str, *arguments: str) -> None:
    # The password is passed in the environment, because other users can read command lines.
    plain = parsed.set(drivername="postgresql", password=None)
    environment = dict(os.environ)
    if parsed.password:
        environment["PGPASSWORD"] = str(parsed.password)
    try:
        done = subprocess.run(  # runs a fixed program, without a shell
            [program, *arguments, "--dbname", plain.render_as_string(hide_password=False)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{program} is not installed; install PostgreSQL's client programs, of the server's "
            "version or a newer one"
        ) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise StorageError(f"{shown_url(parsed)}: {program} failed: {said}")


# The folder ---------------------------------------------------------------------------------------

LIST = "backup.json"
SQLITE = "potluck.sqlite3"
DUMP = "potluck.dump"
STATE = "state"
_CHUNK = 1 << 20


class BackupList(BaseModel):
    """The contents of a backup. files: digest of each file, by path. database: path of the
    database."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    software: str
    created_at: str
    database: str
    files: Mapping[str, str]


def read_list(folder: Path) -> BackupList:
    """Read the list of a backup. Raises ConfigurationError if the folder is not a complete
    backup."""
    path = folder / LIST
    try:
        found = BackupList.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            f"{folder} is not a complete backup: {path} can't be read; name a folder that "
            "`potluck-server backup` created",
            path=folder,
        ) from error
    if found.format != 1 or found.database not in (SQLITE, DUMP):
        raise ConfigurationError(
            f"{folder} is a backup of format {found.format}; restore it with the release that "
            f"made it, {found.software}",
            path=folder,
        )
    return found


def verify(folder: Path, found: BackupList) -> None:
    """Compare all files of a backup with their digests. Raises StorageError if one is missing or
    damaged."""
    for name, digest in found.files.items():
        if digest_of(folder / name) != digest:
            raise StorageError(
                f"{folder / name} is damaged: its BLAKE3 digest differs from the one in {LIST}; "
                "restore "
                "another backup",
                path=folder / name,
            )


def digest_of(path: Path) -> str:
    """Return the digest of a file. Raises StorageError."""
    hasher = blake3()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
    except OSError as error:
        raise disk_error(error, path.parent) from error
    return hasher.hexdigest()


def copy(source: Path, target: Path) -> str:
    """Copy a file and sync the copy to disk; return the digest of the copied bytes.

    Raises OSError.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.copy")
    hasher = blake3()
    try:
        with source.open("rb") as file, temporary.open("wb") as copied:
            os.fchmod(copied.fileno(), os.fstat(file.fileno()).st_mode & 0o700)
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                copied.write(chunk)
            copied.flush()
            sync_data(copied.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return hasher.hexdigest()


@contextlib.contextmanager
def disk_errors_of(folder: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names its file."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, folder) from error
