"""An event loop in its own thread, for callers that have no event loop or run inside one.

A notebook's cells already run inside an event loop, where waiting needs `await`. Coroutines that
connect to a federation run on this loop instead, and callers wait for them from outside.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines on a loop of its own; use `background_loop()`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="potluck", daemon=True)
        thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for its result, from any other thread.

        Ctrl-C cancels it and waits until it has cleaned up.
        """
        future = asyncio.run_coroutine_threadsafe(_guarded(work), self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            done = asyncio.run_coroutine_threadsafe(_settled(), self.loop)
            done.result()
            raise

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Start a coroutine on the loop, from any thread, without waiting.

        Do nothing while Python exits.
        """
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()

    async def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for its result, from another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


async def _guarded(work: Coroutine[Any, Any, Result]) -> Result:
    return await work


async def _settled() -> None:
    """Return once tasks that were cancelled earlier have run their clean-up."""
    await asyncio.sleep(0)


@functools.cache
def background_loop() -> BackgroundLoop:
    """Return the loop of this process; gRPC works with only one."""
    return BackgroundLoop()
