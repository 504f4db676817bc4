"""Converts FedScale's two files about devices, `client_behave_trace` and `client_device_capacity`.

Both are pickled dicts by client. An entry of the first has the lists `active` and `inactive`, the
begin and end of each period of availability in seconds, and `finish_time`, after which the periods
repeat. An entry of the second has `computation`, milliseconds of inference per sample, and
`communication`, a bandwidth, which is dropped, since the virtual clock has no bandwidths.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeGuard

from potluck.common.errors import ConfigurationError
from potluck.common.learning.availability_trace import AvailabilityTrace, TraceSpan

_PASSES: Final = 3.0
"""Cost of training on a sample, as a multiple of inference: FedScale's factor."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse any class or function."""
        raise pickle.UnpicklingError(f"the file contains the object {module}.{name}")

    def persistent_load(self, _: Any) -> NoReturn:
        """Refuse references to objects outside the file."""
        raise pickle.UnpicklingError("the file refers to objects outside the file")


def read_devices(path: Path) -> Mapping[Any, Any]:
    """Return a dict from one of FedScale's pickles, or from the same content as JSON.

    Only plain values are read. Raises ConfigurationError.
    """
    try:
        content = path.read_bytes()
        if content[:1] == b"{":
            found = json.loads(content)
        else:
            found = _PlainUnpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from None
    except Exception as error:  # a damaged pickle raises many kinds of errors
        raise ConfigurationError(
            f"{path} is not a pickle of plain dicts, lists and numbers, or JSON: {error}; "
            "download FedScale's file again",
            path=path,
        ) from None
    if not isinstance(found, dict) or not found:
        raise ConfigurationError(
            f"{path} contains a {type(found).__name__}, not a dict with an entry per client; "
            "download FedScale's file again",
            path=path,
        )
    return found


def fedscale_trace(
    behaviour: Mapping[Any, Any],
    capacity: Mapping[Any, Any] | None = None,
    *,
    clients: int,
    seconds: int | None = None,
    source: str = "the trace",
) -> AvailabilityTrace:
    """Return the trace of client-0, client-1 … from the entries in the order of the file.

    Client k has entry k of each file, modulo the number of entries. (FedScale counts clients from
    1, so its client k has the behaviour of entry k and the device with the key k.) capacity:
    entries of the second file; without them, every speed is 1. With them, a speed is the client's
    samples per second; the run file then needs `seconds_per_sample = 1`. seconds: length of the
    trace, up to which each entry repeats after its own `finish_time`; the longest `finish_time` by
    default. Raises ConfigurationError if an entry is not as FedScale writes it.
    """
    entries = list(behaviour.items())
    devices = None if capacity is None else list(capacity.items())
    chosen = [entries[number % len(entries)] for number in range(clients)]
    finishes = [_number(entry, "finish_time", f"{source}: {key!r}") for key, entry in chosen]
    horizon = float(max(finishes) if seconds is None else seconds)
    spans: dict[str, list[TraceSpan]] = {}
    for number, ((key, entry), finish) in enumerate(zip(chosen, finishes, strict=True)):
        speed = 1.0
        if devices is not None:
            device, values = devices[number % len(devices)]
            latency = _number(values, "computation", f"{source}: device {device!r}")
            speed = 1000.0 / (_PASSES * latency)
        own = _repeated(_stretches(entry, finish, f"{source}: {key!r}"), finish, horizon)
        spans[f"client-{number}"] = [TraceSpan(start, end, speed) for start, end in own]
    return AvailabilityTrace.lasting(spans, horizon)


def _stretches(entry: Any, finish: float, place: str) -> list[tuple[float, float]]:
    """Return an entry's periods of availability within [0, finish), merged and sorted.

    A pair that ends before it begins is never available in FedScale either, so it is dropped.
    """
    begins, ends = (_list(entry, name, place) for name in ("active", "inactive"))
    if len(begins) != len(ends):
        raise ConfigurationError(
            f"{place} has {len(begins)} times in 'active' and {len(ends)} in 'inactive', but must "
            "have as many of both; remove the entry from the file"
        )
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(zip(begins, ends, strict=True)):
        begin, end = max(0.0, begin), min(end, finish)
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif begin < end:
            merged.append((begin, end))
    return merged


def _repeated(
    stretches: Sequence[tuple[float, float]], finish: float, horizon: float
) -> Iterator[tuple[float, float]]:
    """Yield periods of availability, repeated after each `finish`, up to the horizon."""
    for turn in range(math.ceil(horizon / finish)):
        for begin, end in stretches:
            start, stop = turn * finish + begin, min(turn * finish + end, horizon)
            if start < stop:
                yield start, stop


def _number(entry: Any, name: str, place: str) -> float:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not _is_number(value) or value <= 0:
        raise ConfigurationError(
            f"{place} has {value!r} as '{name}', but must have a number above 0; remove the entry "
            "from the file"
        )
    return float(value)


def _list(entry: Any, name: str, place: str) -> list[float]:
    values = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise ConfigurationError(
            f"{place} has no list of numbers '{name}'; remove the entry from the file"
        )
    return [float(value) for value in values]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
