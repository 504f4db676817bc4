"""An append-only file of JSON lines; `add` returns once its line is on disk.

An incomplete last line, left by a crash, is overwritten: no caller has acted on it. Blocking; one
caller at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from potluck.common.disk import sync_path
from potluck.common.errors import StorageError

Line = Mapping[str, Any]


class StoredLines:
    """The lines of one file; a missing file has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0

    def read(self) -> list[Line]:
        """Return all lines, oldest first. Raises StorageError if one is damaged."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise self._unusable(error) from error
        whole = content[: content.rfind(b"\n") + 1]
        self._size = len(whole)
        try:
            lines: list[Any] = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) for line in lines):
            raise StorageError(
                f"{self.path} is damaged; restore it from a backup, or start a new run",
                path=self.path,
            )
        return lines

    def add(self, line: Line) -> None:
        """Append a line; return when it is on disk. Call `read` before the first one.

        Raises StorageError; the file then has no new line.
        """
        data = json.dumps(line, separators=(",", ":"), sort_keys=True).encode() + b"\n"
        try:
            self._write(data)
        except OSError as error:
            raise self._unusable(error) from error
        self._size += len(data)

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            file.seek(self._size)
            file.truncate()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not self._size:
            for folder in (self.path.parent, self.path.parent.parent):
                sync_path(folder)

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"can't use {self.path}: {error.strerror}; check its disk", path=self.path
        )
