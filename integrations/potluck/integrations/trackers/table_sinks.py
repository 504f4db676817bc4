"""Sinks that write a table for each run: CSV or Parquet, with the columns of `potluck export`."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from potluck.common.errors import StorageError
from potluck.common.tables.round_columns import ROUND, columns_of
from potluck.common.tables.table_files import csv_text, write_table
from potluck.server.sink import Sink, TrackedRound, TrackedRun


class CsvFiles(Sink):
    """Writes RUN.csv in a folder, one line per round.

    Lines are appended; if a round has a new column, the whole file is written again.
    """

    alone_in = "folder"

    def __init__(self, *, folder: str = ".") -> None:
        """folder: folder of the files; made if missing."""
        self._folder = Path(folder)
        self._columns: dict[str, list[str]] = {}

    def open(self, run: TrackedRun) -> int:
        """Remove a half-written last line; return the round number of the last line, or 0."""
        path = self._path(run)
        self._folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        columns, rows = _read(path)
        self._columns[run.run_id] = columns
        if columns and columns[0] != ROUND:
            raise StorageError(
                f"the first column of {path} must be '{ROUND}'; move the file to another folder",
                path=path,
            )
        return int(rows[-1][ROUND]) if rows else 0

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Append the rounds' lines."""
        path, known = self._path(run), self._columns[run.run_id]
        rows = [each.row for each in rounds]
        columns = columns_of(rows, known)
        if columns != known:
            before = _read(path)[1]
            write_table(path, columns, [*before, *rows])
            self._columns[run.run_id] = columns
            return
        with path.open("r+b") as file:  # fails if the file was removed: then `open` makes a new one
            file.seek(0, os.SEEK_END)
            file.write(csv_text(columns, rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def _path(self, run: TrackedRun) -> Path:
        return self._folder / f"{run.run_id}.csv"


class ParquetFiles(Sink):
    """Writes RUN.parquet in a folder, one row per round.

    Parquet can't be appended to, so new rounds rewrite the file, at most once per `seconds`.
    """

    alone_in = "folder"
    library = "pyarrow"
    extra = "potluck[parquet]"

    def __init__(self, *, folder: str = ".", seconds: float = 10.0) -> None:
        """folder: folder of the files, made if missing. seconds: minimum time between writes."""
        self._folder = Path(folder)
        self.pause_seconds = seconds
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def open(self, run: TrackedRun) -> int:
        """Read the existing file; return the round number of the last row, or 0."""
        import pyarrow.parquet

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(run)
        rows: list[dict[str, Any]] = []
        if path.exists():
            rows = pyarrow.parquet.read_table(path).to_pylist()
        self._rows[run.run_id] = rows
        return int(rows[-1][ROUND]) if rows else 0

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Write the file again, with these rounds added."""
        rows = [*self._rows[run.run_id], *(each.row for each in rounds)]
        write_table(self._path(run), columns_of(rows), rows)
        self._rows[run.run_id] = rows

    def end(self, run: TrackedRun) -> None:
        """Drop the run's rows from memory."""
        self._rows.pop(run.run_id, None)

    def _path(self, run: TrackedRun) -> Path:
        return self._folder / f"{run.run_id}.parquet"


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return (columns, rows) of a CSV file, all as text."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or ()), rows
