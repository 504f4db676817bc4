"""The threads that compute, one for each device: one thing at a time, in the order asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Device = TypeVar("Device")
Result = TypeVar("Result")


class _Thread(Generic[Device]):
    """A thread with a device of its own."""

    def __init__(self, make: Callable[[], Device]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._device: Future[Device] = self._executor.submit(make)

    def submit(self, function: Callable[[Device], Result]) -> Future[Result]:
        return self._executor.submit(lambda: function(self._device.result()))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Worker(Generic[Device]):
    """Runs functions on devices in threads of their own, so that the control stream stays
    alive. Each device has one thread: trainings on it never overlap. Lives on the event loop."""

    def __init__(self, *makes: Callable[[], Device]) -> None:
        """Each of `makes` is called in its thread, at once; what it raises, `run` raises."""
        self._threads = [_Thread(make) for make in makes]
        self._idle: asyncio.Queue[_Thread[Device]] = asyncio.Queue()
        for thread in self._threads:
            self._idle.put_nowait(thread)

    async def run(self, function: Callable[[Device], Result]) -> Result:
        """Call `function` with a device, the next that is free after all that was asked before.

        Cancelling takes it from the queue; if it has begun, it goes on, and must notice itself.
        """
        loop = asyncio.get_running_loop()
        thread = await self._idle.get()

        def free(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._idle.put_nowait, thread)

        future = thread.submit(function)
        future.add_done_callback(free)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take everything from the queue; does not wait for what has begun."""
        for thread in self._threads:
            thread.close()
