"""Recorded availability and speed of clients, for the virtual clock.

A trace is a CSV file with one row per client and stretch of time:

    client,start,end,speed
    client-0,0,28800,1.0
    client-0,79200,86400,0.5

Times are simulated seconds since the start of a run, in microsecond steps; a stretch excludes
`end`. A client is available during its rows, and unavailable between them. `speed` divides the
duration of its trainings; 0 means unavailable. In place of `speed`, a file may have the column
`state` with the values `available` and `unavailable`. After the largest `end`, the trace repeats.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from potluck.common.errors import ConfigurationError
from potluck.common.names import is_name

STATES: Final[Mapping[str, float]] = {"available": 1.0, "unavailable": 0.0}
"""The values of the column `state`, with the speed that each stands for."""

_COLUMNS = ("client", "start", "end")
_DECIMALS = 6  # decimals of a second; floats lose finer differences in sums
_LONGEST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A stretch of time. start, end: simulated seconds, 0 ≤ start < end; the span excludes `end`.

    speed: divisor of the duration of a training that begins in the span; 0 if unavailable.
    """

    start: float
    end: float
    speed: float


@dataclass(frozen=True, slots=True)
class AvailabilityTrace:
    """The spans of each client, sorted and without overlaps.

    period: simulated seconds after which the trace repeats: the largest end of a span.
    """

    spans: Mapping[str, Sequence[TraceSpan]]
    period: float

    @classmethod
    def of(cls, spans: Mapping[str, Iterable[TraceSpan]]) -> AvailabilityTrace:
        """Return the trace of these spans. There must be at least one, and none may overlap."""
        in_order = {
            client: tuple(sorted(own, key=lambda span: span.start)) for client, own in spans.items()
        }
        return cls(in_order, max(own[-1].end for own in in_order.values() if own))

    @classmethod
    def lasting(cls, spans: Mapping[str, Iterable[TraceSpan]], seconds: float) -> AvailabilityTrace:
        """Return the trace of these spans with the period `seconds`. All spans must end within it.

        Clients without a span are unavailable at all times.
        """
        full = {
            client: list(own) or [TraceSpan(0.0, seconds, 0.0)] for client, own in spans.items()
        }
        first = next(iter(full.values()))
        if cls.of(full).period < seconds:
            first.append(TraceSpan(max(span.end for span in first), seconds, 0.0))
        return cls.of(full)

    def speed(self, client: str, at: float) -> float:
        """Return a client's speed at a time; 0 if it is unavailable or not in the trace."""
        span = self._span(client, self._position(at))
        return 0.0 if span is None else span.speed

    def stays(self, client: str, at: float, seconds: float) -> bool:
        """Return True if a client is available at a time and for the next `seconds`."""
        left, position = seconds, self._position(at)
        for _ in range(2 * len(self.spans.get(client, ())) + 1):
            span = self._span(client, position)
            if span is None or span.speed == 0.0:
                return False
            left -= span.end - position
            if left <= 0:
                return True
            position = 0.0 if span.end >= self.period else span.end
        return True  # available during a whole period, and so always

    def next_time(self, clients: Sequence[str], at: float, count: int) -> float | None:
        """Return the earliest time, not before `at`, at which `count` of these clients are
        available.

        Returns None if there is no such time.
        """
        position = self._position(at)
        own = [s for client in clients for s in self.spans.get(client, ()) if s.speed > 0.0]
        starts = np.sort(np.array([span.start for span in own]))
        ends = np.sort(np.array([span.end for span in own]))
        later = np.unique(starts[starts > position])
        earlier = np.unique(starts[starts <= position])
        for times, shift in (([position], 0.0), (later, 0.0), (earlier, self.period)):
            moments = np.asarray(times, dtype=np.float64)
            begun = np.searchsorted(starts, moments, side="right")
            over = np.searchsorted(ends, moments, side="right")
            enough = np.flatnonzero(begun - over >= count)
            if len(enough):
                return at + (float(moments[enough[0]]) + shift - position)
        return None

    def _position(self, at: float) -> float:
        """Return the time since the trace last began, in [0, period)."""
        position = round(at % self.period, _DECIMALS)
        return position if position < self.period else 0.0

    def _span(self, client: str, position: float) -> TraceSpan | None:
        own = self.spans.get(client, ())
        place = bisect_right(own, position, key=lambda span: span.start) - 1
        return own[place] if place >= 0 and position < own[place].end else None


def read_trace(name: str, data: Path | None, *, sha256: str | None = None) -> AvailabilityTrace:
    """Read the trace of a run from the data directory.

    name: path in the data directory. sha256: expected digest of the file, in hexadecimal digits;
    None if any content is accepted. Raises ConfigurationError if the file is missing, is outside
    the directory, has another digest, or is invalid.
    """
    if data is None:
        raise ConfigurationError(
            f"virtual_clock.trace is '{name}', but the coordinator has no data directory; set "
            "data_directory in its configuration file",
            name=name,
        )
    path = (data / name).resolve()
    if not path.is_relative_to(data.resolve()):
        raise ConfigurationError(
            f"virtual_clock.trace is '{name}', which is outside the coordinator's data directory "
            f"{data}; move the file there, and name it relative to the directory",
            name=name,
        )
    return read_trace_file(path, sha256=sha256)


def read_trace_file(path: Path, *, sha256: str | None = None) -> AvailabilityTrace:
    """Read a trace; see `read_trace`. Raises ConfigurationError."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"can't read the trace {path}: {error.strerror}; create it with `potluck traces`",
            path=path,
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"the trace {path} is not UTF-8 text (byte {error.start}); save it as CSV", path=path
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise ConfigurationError(
            f"the trace {path} has the SHA-256 {found}, and virtual_clock.trace_sha256 is "
            f"{sha256}; restore the file, or change trace_sha256",
            path=path,
        )
    return parse_trace(text, source=str(path))


def parse_trace(text: str, *, source: str) -> AvailabilityTrace:
    """Return the trace of a CSV text. source: name of the file, for errors.

    Raises ConfigurationError with the file, the line, the value and what to change.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    spans: dict[str, list[TraceSpan]] = {}
    try:
        kind = _kind(next(reader, []), source)
        for row in reader:
            place = f"{source}, line {reader.line_num}"
            client, span = _parsed(row, kind, place)
            own = spans.setdefault(client, [])
            if own and span.start < own[-1].end:
                raise ConfigurationError(
                    f"{place}: 'start' is {row[1]}, but the row before of client '{client}' ends "
                    f"at {own[-1].end:g}; sort the rows of each client by start, without overlaps"
                )
            own.append(span)
    except csv.Error as error:
        raise ConfigurationError(
            f"{source}, line {reader.line_num}: not valid CSV: {error}; write four values without "
            "quotes, separated by commas"
        ) from None
    if not any(span.speed > 0.0 for own in spans.values() for span in own):
        raise ConfigurationError(
            f"{source}: no client is ever available; add a row such as client-0,0,3600,"
            + ("1.0" if kind == "speed" else "available")
        )
    return AvailabilityTrace.of(spans)


def _kind(header: Sequence[str], source: str) -> str:
    """Return the name of a trace's fourth column: state or speed."""
    if tuple(header[:3]) != _COLUMNS or tuple(header[3:]) not in (("speed",), ("state",)):
        raise ConfigurationError(
            f"{source}, line 1: the column names are '{_shown(','.join(header))}'; write "
            "'client,start,end,speed' or 'client,start,end,state'"
        )
    return header[3]


def _parsed(row: Sequence[str], kind: str, place: str) -> tuple[str, TraceSpan]:
    if len(row) != 4:
        raise ConfigurationError(
            f"{place}: the row '{_shown(','.join(row))}' has {len(row)} values; write four: "
            f"client,start,end,{kind}"
        )
    client = row[0]
    if not is_name(client):
        raise ConfigurationError(
            f"{place}: 'client' is '{_shown(client)}', which is not a client id; use lower-case "
            "letters, digits, '.', '_' and '-', such as client-0"
        )
    start = _seconds(row[1], "start", place)
    end = _seconds(row[2], "end", place)
    if not start < end:
        raise ConfigurationError(
            f"{place}: 'end' is {row[2]}, but 'start' is {row[1]}; write an end that is after "
            "the start"
        )
    return client, TraceSpan(start, end, _speed(row[3], kind, place))


def _seconds(value: str, column: str, place: str) -> float:
    number = _number(value)
    if number is None:
        raise ConfigurationError(
            f"{place}: '{column}' is '{_shown(value)}'; write seconds since the start of the run, "
            "such as 3600"
        )
    return round(number, _DECIMALS)


def _speed(value: str, kind: str, place: str) -> float:
    if kind == "state":
        if value not in STATES:
            raise ConfigurationError(
                f"{place}: 'state' is '{_shown(value)}'; write 'available' or 'unavailable'"
            )
        return STATES[value]
    number = _number(value)
    if number is None:
        raise ConfigurationError(
            f"{place}: 'speed' is '{_shown(value)}'; write a number ≥ 0, such as 1.0 (0 means "
            "unavailable)"
        )
    return number


def _number(value: str) -> float | None:
    """Return a finite number ≥ 0; None if the text is not one."""
    try:
        number = float(value)
    except ValueError:
        return None
    sound = math.isfinite(number) and number >= 0 and value == value.strip()
    return number if sound else None


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "…"


def trace_text(spans: Mapping[str, Iterable[TraceSpan]]) -> str:
    """Return the CSV text of a trace, with speeds; the inverse of `parse_trace`."""
    lines = ["client,start,end,speed"]
    lines += [
        f"{client},{_plain(span.start)},{_plain(span.end)},{_plain(span.speed)}"
        for client, own in spans.items()
        for span in own
    ]
    return "\n".join(lines) + "\n"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else repr(number)
