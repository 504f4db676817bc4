"""Check of the product's time limits that also works on a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.1
_SPARE_SECONDS = 15.0
"""Time by which a limit may be exceeded, since the machine may be busy."""


async def in_time(seconds: float, awaited: Awaitable[Result]) -> Result:
    """Wait for a result and return it. Raises AssertionError if it takes much longer than
    `seconds`.

    The time is the number of checks that this process could make, so that pauses of the whole
    machine do not count.
    """
    task = asyncio.ensure_future(awaited)
    try:
        for _ in range(round((seconds + _SPARE_SECONDS) / _LOOK_SECONDS)):
            done, _ = await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if done:
                return task.result()
    finally:
        task.cancel()
    raise AssertionError(f"not within {seconds:g} s, nor {_SPARE_SECONDS:g} s later")
