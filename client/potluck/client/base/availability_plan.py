"""The owner's plan of when the clients of a host are available."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field, field_validator

from potluck.common.names import ClientId
from potluck.common.settings.configuration import Settings

Forecast = Callable[[ClientId, float, float], float]
"""Function that returns the chance in [0, 1] that a client is available between two times:
`forecast(client, begin, end)`."""

_DAY = 86400.0
_HOURS = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-4]):([0-5][0-9])")


class AvailabilityPlan(Settings):
    """The chance that a client is available, and the hours outside of which the chance is 0."""

    chance: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Probability that a client of this host is available, during `hours`.",
    )
    hours: tuple[str, ...] = Field(
        default=(),
        description='Hours in which this host is available, in UTC, such as ["20:00-06:00"].\n'
        "Unset: all day.",
    )
    clients: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict,
        description="Probabilities of single clients, instead of `chance`, such as clients = "
        "{client-3 = 0.2}.",
    )

    @field_validator("hours")
    @classmethod
    def _sound(cls, hours: tuple[str, ...]) -> tuple[str, ...]:
        for text in hours:
            found = _HOURS.fullmatch(text)
            if found is None or (found[3] == "24" and found[4] != "00"):
                raise ValueError(f"'{text[:40]}' must be two times of day, such as 20:00-06:00")
        return hours

    def forecast(self, client: str, begin: float, end: float) -> float:
        """Return the chance that a client is available between two times.

        The result is the chance set for this client, times the share of the interval that lies
        within the plan's hours. begin, end: seconds since 1970, begin ≤ end; if they are equal, the
        interval is a moment.
        """
        chance = self.clients.get(client, self.chance)
        return chance * _share(_spans(self.hours), begin, end) if self.hours else chance


def always(client: ClientId, begin: float, end: float) -> float:  # noqa: ARG001  a `Forecast`
    """Return 1, the forecast for a host without a plan."""
    return 1.0


def _share(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    if not end > begin:
        return float(any(first <= begin % _DAY < last for first, last in spans))
    within = _until(spans, end) - _until(spans, begin)
    return min(1.0, max(0.0, within / (end - begin)))


def _until(spans: Sequence[tuple[float, float]], time: float) -> float:
    """Return the number of seconds from 1970 to `time` that lie within the daily spans."""
    days, rest = math.floor(time / _DAY), time % _DAY
    today = sum(max(0.0, min(last, rest) - first) for first, last in spans)
    return days * sum(last - first for first, last in spans) + today


def _spans(hours: Sequence[str]) -> list[tuple[float, float]]:
    """Return the hours as seconds of the day, sorted and merged; split a span over midnight."""
    found: list[tuple[float, float]] = []
    for text in hours:
        numbers = [int(number) for number in re.findall("[0-9]{2}", text)]
        begin, end = (60.0 * (60 * numbers[at] + numbers[at + 1]) for at in (0, 2))
        found += [(begin, end)] if begin < end else [(begin, _DAY), (0.0, end)]
    apart: list[tuple[float, float]] = []
    for begin, end in sorted(found):
        if apart and begin <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((begin, end))
    return apart
