"""Runs work to its end, even if its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if the caller is cancelled; return its result.

    A cancellation is raised after `work` has ended; the result is then lost. Use this for work that
    must not be interrupted, such as a thread's use of a file that the caller then closes.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieve it: asyncio logs exceptions that were never retrieved
        raise
