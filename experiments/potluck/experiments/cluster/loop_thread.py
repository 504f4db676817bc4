"""An event loop in a thread of its own, for objects that are called from several threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines from any thread in one loop; ends with the process.

    A Ray actor with coroutines as methods has its own loop, but that may be unable to start
    processes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="federation", daemon=True).start()

    def do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end. Return its result, or raise its exception."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
