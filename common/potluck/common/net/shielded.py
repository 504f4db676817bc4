"""Work that is finished even if its caller is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Return the outcome of `work`, which is finished even if the caller is cancelled.

    A cancellation is raised once `work` is over; the outcome is then lost. For work that must not
    be left half done, such as a thread's with a file that is closed next.
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
