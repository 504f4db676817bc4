"""Seconds of real time, in settings and in messages from other machines.

They are at most a year, because clocks and dates overflow at infinite or very large numbers.
"""

from __future__ import annotations

from typing import Annotated, Final

from google.protobuf.duration_pb2 import Duration
from pydantic import Field

YEAR_SECONDS: Final = 31_536_000

Seconds = Annotated[float, Field(gt=0, le=YEAR_SECONDS)]
"""Seconds of real time in a setting: more than 0, and at most a year."""


def seconds_of(duration: Duration) -> float:
    """Return the seconds of a duration from another machine, limited to between 0 and a year.

    The duration's own methods raise OverflowError if it is too long.
    """
    return min(max(duration.seconds + duration.nanos / 1e9, 0.0), float(YEAR_SECONDS))
