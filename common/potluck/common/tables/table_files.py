"""Reads and writes tables in files: .csv or .parquet, depending on the file's name."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.common.errors import ConfigurationError

SUFFIXES = (".csv", ".parquet")


def check_table_name(path: Path) -> None:
    """Raise ConfigurationError unless a file's suffix is .csv or .parquet."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(
            f"{path}: a table is written as .csv or .parquet; name it {path.with_suffix('.csv')}",
            path=path,
        )


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table atomically: a reader sees either the earlier file or the complete new one.

    A row may lack columns. Missing values and NaN are written as empty cells. Raises
    ConfigurationError if the suffix is neither .csv nor .parquet, OSError if the file can't be
    written.
    """
    check_table_name(path)
    temporary = path.with_name(f".{path.name}.new")
    if path.suffix.lower() == ".csv":
        temporary.write_text(csv_text(columns, rows, header=True), encoding="utf-8", newline="")
    else:
        _write_parquet(temporary, columns, rows)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path)


def csv_text(
    columns: Sequence[str], rows: Iterable[Mapping[str, object]], *, header: bool = False
) -> str:
    """Return lines of CSV, with numbers in full precision. header: True to start with a line of
    column names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()


def _write_parquet(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> None:
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    values: dict[str, list[Any]] = {
        name: [_cell(row.get(name)) for row in listed] for name in columns
    }
    pyarrow.parquet.write_table(pyarrow.table(values), path)


def _cell(value: object) -> object:
    """Return None for NaN, and every other value unchanged."""
    return None if isinstance(value, float) and math.isnan(value) else value
