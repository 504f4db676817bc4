"""Dumps and restores PostgreSQL databases with PostgreSQL's own programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from sqlalchemy import URL

from potluck.common.errors import ConfigurationError, StorageError
from potluck.server.store.sql.database import parse_url, shown_url
from potluck.server.store.sql.schema import metadata


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
        done = subprocess.run(  # a fixed program, no shell
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
