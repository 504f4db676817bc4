"""What the product promises to do within some seconds, held against it on a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.1
_SPARE = 2
"""So many times what is promised may pass: the machine has other things to do."""


async def in_time(seconds: float, awaited: Awaitable[Result]) -> Result:
    """What comes of it. Raises AssertionError where it takes much longer than so many seconds.

    Counted is how often this process could look, so that time in which the machine stood still is
    nobody's.
    """
    task = asyncio.ensure_future(awaited)
    try:
        for _ in range(round(_SPARE * seconds / _LOOK_SECONDS)):
            done, _ = await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if done:
                return task.result()
    finally:
        task.cancel()
    raise AssertionError(f"not within {seconds:g} s, nor {_SPARE} times that")
