"""Seconds of real time, in settings and in messages from other machines.

They are at most a year, because clocks and dates overflow at infinite or very large numbers.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

YEAR_SECONDS: Final = 31_536_000

Seconds = Annotated[float, Field(gt=0, le=YEAR_SECONDS)]
"""Seconds of real time in a setting: more than 0, and at most a year."""
