"""The thread that computes: one thing at a time, in the order in which it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Bench = TypeVar("Bench")
Result = TypeVar("Result")


class Worker(Generic[Bench]):
    """Runs functions on a workbench in a thread of its own, so that the control stream stays
    alive. The device has one worker: trainings on it never overlap."""

    def __init__(self, make: Callable[[], Bench]) -> None:
        """`make` is called in the thread, at once; what it raises, `run` raises."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._bench: Future[Bench] = self._executor.submit(make)

    async def run(self, function: Callable[[Bench], Result]) -> Result:
        """Call `function` with the workbench when everything asked for before is done.

        Cancelling takes it from the queue; if it has begun, it goes on, and must notice itself.
        """
        return await asyncio.wrap_future(
            self._executor.submit(lambda: function(self._bench.result()))
        )

    def close(self) -> None:
        """Take everything from the queue; does not wait for what has begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
