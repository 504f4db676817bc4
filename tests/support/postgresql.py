"""A private PostgreSQL server for tests, from Debian's package."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

_ROOM = Path("/usr/lib/postgresql")
MISSING = f"PostgreSQL is not installed: no {_ROOM}/*/bin/initdb; apt-get install postgresql"


class PostgreSQL:
    """A server that listens only on a Unix socket in its own directory."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs = programs
        self._directory = directory
        self._schemas = 0

    def start(self) -> None:
        """Start and wait until it answers. Nothing is synced to disk: tests need speed only."""
        options = f"-k {self._directory} -c listen_addresses= -c fsync=off -c max_connections=20"
        self._control("start", "-o", options, "-l", str(self._directory / "log"))

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server: at once, as in a crash; or with mode `fast`, as an administrator
        does."""
        self._control("stop", "-m", mode)

    def new_schema(self) -> str:
        """Create an empty schema and return a URL for which it looks like an empty database."""
        self._schemas += 1
        name = f"potluck{self._schemas}"
        with psycopg.connect(host=str(self._directory), user="postgres", autocommit=True) as link:
            link.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        return self.url("postgres") + f"&options=-csearch_path%3D{name}"

    def url(self, name: str) -> str:
        """Return the URL of a database, which need not exist."""
        return f"postgresql+psycopg://postgres@/{name}?host={self._directory}"

    def create(self) -> None:
        """Create the files of the server."""
        program = str(self._programs / "initdb")
        locale = ["-E", "UTF8", "--locale=C.UTF-8"]
        _run([program, "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync", *locale])

    @property
    def _data(self) -> str:
        return str(self._directory / "data")

    def _control(self, *arguments: str) -> None:
        _run([str(self._programs / "pg_ctl"), "-D", self._data, "-w", "-s", *arguments])


def programs() -> Path | None:
    """Return the program folder of the newest installed PostgreSQL; None if none is installed."""
    found = sorted(_ROOM.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@contextmanager
def running_postgresql() -> Iterator[PostgreSQL]:
    """Run a server while the block runs."""
    where = programs()
    if where is None:
        raise FileNotFoundError(MISSING)
    directory = Path(tempfile.mkdtemp(prefix="potluck-postgresql-"))
    try:
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            os.chown(directory, pwd.getpwnam("postgres").pw_uid, -1)
        server = PostgreSQL(where, directory)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def _run(command: list[str]) -> None:
    if os.geteuid() == 0:
        command = ["runuser", "-u", "postgres", "--", *command]
    # Don't capture output through a pipe: the server would inherit the pipe and keep it open.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", check=False
        )
        output.seek(0)
        if done.returncode:
            raise RuntimeError(f"{command[-1]}: {output.read().decode()}")
