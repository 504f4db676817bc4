"""Work that is finished even if its caller is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`; a cancellation waits until it is over, and then its outcome is lost.

    For work that must not be left half done, such as a thread's with a file that is closed next.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at: asyncio complains of those nobody looked at
        raise
