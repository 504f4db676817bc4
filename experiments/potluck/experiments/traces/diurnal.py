"""Generated traces of devices that are available at night, each in its own time zone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from potluck.common.learning.availability_trace import AvailabilityTrace, TraceSpan

DAY: Final = 86_400
_SHORTEST: Final = 600
_ZONE_HOURS: Final = 24


@dataclass(frozen=True, kw_only=True)
class Diurnal:
    """A population of devices.

    clients: number of clients, for client-0, client-1 … days: length of the trace. seed: seed of
    all draws. hours: mean length of a night's availability, in hours. spread: standard deviation of
    the night's begin and of its length, in hours. zones: number of time zones, between which
    clients are drawn with equal probability; 1 if all nights coincide. skipped: probability that a
    device is unavailable for a whole night. speed_spread: standard deviation of the logarithm of a
    client's speed, whose median is 1.
    """

    clients: int
    days: int = 7
    seed: int = 0
    hours: float = 8.0
    spread: float = 1.0
    zones: int = 1
    skipped: float = 0.1
    speed_spread: float = 0.5


def diurnal_trace(of: Diurnal) -> AvailabilityTrace:
    """Return the trace of a population; equal options give equal traces. Pure.

    A night that is under way when the trace ends continues at its start, because the trace repeats.
    Each client has its own random generator: client-3 is the same among 10 or 1,000 clients.
    """
    horizon = of.days * DAY
    spans: dict[str, list[TraceSpan]] = {}
    for number in range(of.clients):
        generator = np.random.default_rng((of.seed, number))
        speed = round(float(np.exp(of.speed_spread * generator.standard_normal())), 4)
        zone = int(generator.integers(of.zones)) * _ZONE_HOURS / of.zones
        nights: list[tuple[int, int]] = []
        for day in range(of.days):
            begin_hour, length, drawn = (
                22.0 + zone + of.spread * generator.standard_normal(),
                of.hours + of.spread * generator.standard_normal(),
                generator.random(),
            )
            if drawn >= of.skipped:
                start = day * DAY + round(3600 * begin_hour)
                nights.append((start, start + max(_SHORTEST, round(3600 * length))))
        speed = max(speed, 0.0001)
        spans[f"client-{number}"] = [
            TraceSpan(start, end, speed) for start, end in _repeated(nights, horizon)
        ]
    return AvailabilityTrace.lasting(spans, horizon)


def _repeated(nights: Iterable[tuple[int, int]], horizon: int) -> list[tuple[int, int]]:
    """Return the begin and end of each time in [0, horizon) that is in a night, if the nights
    repeat after `horizon` seconds; sorted, without overlaps."""
    parts: list[tuple[int, int]] = []
    for begin, end in nights:
        start = begin % horizon
        stop = start + min(end - begin, horizon)
        parts.append((start, min(stop, horizon)))
        if stop > horizon:
            parts.append((0, stop - horizon))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
