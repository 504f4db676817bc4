"""Converts Python values to columns and back. All values that are read are checked.

If a row can't be decoded, CorruptRowError is raised. The database turns it into a StorageError that
names file, table, row and column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Executable

from potluck.common.errors import StorageError

Record = TypeVar("Record")
Row = Mapping[str, Any]
"""A row from the database: values by column name."""


class CorruptRowError(Exception):
    """A row with content that this software can't have written."""


def encode_time(at: datetime) -> str:
    """Return the time as ISO 8601 text in UTC with microseconds. The length is constant, so sorting
    the text sorts by time."""
    if at.tzinfo is None:
        raise StorageError(f"the time {at.isoformat()} has no time zone; pass a datetime with one")
    return at.astimezone(UTC).isoformat(timespec="microseconds")


def decode_time(value: object) -> datetime:
    """Inverse of `encode_time`. Raises ValueError if the text is not a time."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a valid time")
    at = datetime.fromisoformat(value)
    if at.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return at.astimezone(UTC)


def encode_text(text: str) -> str:
    """Return the text without NUL characters, which PostgreSQL refuses, and without lone
    surrogates, which UTF-8 refuses."""
    clean = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return clean.encode("utf-8", "replace").decode("utf-8")


def encode_float(value: float | None) -> float | None:
    """Return the number; None for NaN, which SQLite would store as NULL anyway."""
    return None if value is None or math.isnan(value) else value


def encode_json(value: Mapping[str, Any]) -> str:
    """Return canonical JSON: sorted keys, no spaces, ASCII. NaN and infinities have Python's form,
    which is not standard JSON."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StorageError(f"{value!r} can't be stored: {error}; pass JSON values only") from error


def encode_value(value: object) -> object:
    """Return the column value of a record's field, depending on its type."""
    match value:
        case bool():
            return int(value)
        case float():
            return encode_float(value)
        case Mapping():
            return encode_json(value)
        case _:
            return value


def encode_numbers(numbers: Sequence[float] | None) -> str | None:
    """Return a JSON list of the numbers, with infinities as Python writes them. None gives None."""
    if numbers is None:
        return None
    return json.dumps([float(number) for number in numbers], separators=(",", ":"))


def encode_names(names: Sequence[str] | None) -> str | None:
    """Return a JSON list of the strings. None gives None."""
    return None if names is None else json.dumps(list(names), separators=(",", ":"))


def decode_numbers(value: object) -> tuple[float, ...] | None:
    """Inverse of `encode_numbers`. Raises ValueError if the text is not such a list."""
    return None if value is None else _NUMBERS.validate_python(decode_json(value))


_NUMBERS = TypeAdapter(tuple[float, ...])


def decode_names(value: object) -> tuple[str, ...]:
    """Inverse of `encode_names`; None gives (). Raises ValueError if not a JSON list of strings."""
    return () if value is None else _NAMES.validate_python(decode_json(value))


_NAMES = TypeAdapter(tuple[str, ...])


def decode_json(value: object) -> Any:
    """Return the value of JSON text. Raises ValueError if it is not JSON."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not valid JSON")
    return json.loads(value)


def encode_rows(rows: Iterable[int]) -> str:
    """Return sorted row numbers as JSON [[first, last], …]. Most available rows are consecutive, so
    this is short."""
    array: NDArray[np.int64] = np.unique(np.fromiter(rows, dtype=np.int64))
    breaks = np.flatnonzero(np.diff(array) != 1)
    firsts = array[np.concatenate(([0], breaks + 1))] if array.size else array
    lasts = array[np.concatenate((breaks, [array.size - 1]))] if array.size else array
    return json.dumps(np.stack((firsts, lasts), axis=1).tolist(), separators=(",", ":"))


def decode_rows(value: object) -> tuple[int, ...]:
    """Inverse of `encode_rows`. Raises ValueError if the text is not such a list."""
    pairs = _PAIRS.validate_python(decode_json(value))
    return tuple(row for first, last in pairs for row in range(first, last + 1))


_PAIRS = TypeAdapter(list[tuple[int, int]])


def read_rows(connection: Connection, query: Executable, **parameters: object) -> list[Row]:
    """Return the rows of a query, as plain dicts. parameters: the query's parameters by name."""
    result = connection.execute(query, parameters)
    names = list(result.keys())
    return [dict(zip(names, row, strict=True)) for row in result]


class Reader(Generic[Record]):
    """Turns rows of one table into records of one dataclass; checks every field."""

    def __init__(
        self,
        record: type[Record],
        table: str,
        key: Sequence[str],
        decoders: Mapping[str, Callable[[object], object]] | None = None,
    ) -> None:
        self._adapter = TypeAdapter(record)
        self._table = table
        self._key = key
        self._decoders = decoders or {}

    def __call__(self, row: Row, **others: object) -> Record:
        """Return the record of a row. others: values of fields that are not columns."""
        values: dict[str, object] = {**row, **others}
        for column, decode in self._decoders.items():
            try:
                values[column] = decode(values[column])
            except (ValueError, TypeError) as error:  # json.JSONDecodeError is a ValueError
                raise self._corrupt(row, column, str(error)) from error
        try:
            return self._adapter.validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            column = ".".join(str(part) for part in first["loc"])
            raise self._corrupt(row, column, first["msg"]) from error

    def _corrupt(self, row: Row, column: str, why: str) -> CorruptRowError:
        key = ", ".join(f"{name} {row[name]!r}" for name in self._key)
        detail = " ".join(why.split())
        return CorruptRowError(f"table {self._table}, {key}, column {column}: {detail}")
