"""The threads that compute, one for each device: one thing at a time, in the order asked.

Nothing can stop a thread from outside. One that goes on with what nobody waits for is left behind,
and another takes its place, so that a host whose task hangs stays of use. A thread that imports a
module may finish that first.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import structlog

from potluck.common.interruptible import interrupt
from potluck.common.learning.task_failures import crashed

log = structlog.get_logger()

PATIENCE_SECONDS = 30.0
IMPORT_SECONDS = 300.0
"""The time for an import to end; a thread that takes longer is left behind uninterrupted."""
_LOOK_SECONDS = 0.1

Device = TypeVar("Device")
Result = TypeVar("Result")


class _Thread(Generic[Device]):
    """A thread with a device of its own."""

    def __init__(self, make: Callable[[], Device]) -> None:
        self._make = make
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._ident: Future[int] = self._executor.submit(threading.get_ident)
        self._device: Future[Device] = self._executor.submit(make)

    def submit(self, function: Callable[[Device], Result]) -> Future[Result]:
        """Call a function with the device. KeyboardInterrupt and SystemExit, which would end the
        event loop, become a TrainingError: no signal arrives in this thread."""

        def call() -> Result:
            try:
                return function(self._device.result())
            except (KeyboardInterrupt, SystemExit) as error:
                raise crashed(error) from error

        return self._executor.submit(call)

    def interrupt(self) -> bool:
        """Have it end when it next runs Python code. Returns False while it imports a module."""
        return interrupt(self._ident.result())

    def successor(self) -> _Thread[Device]:
        """Another in its place."""
        self.close()
        return _Thread(self._make)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Worker(Generic[Device]):
    """Runs functions on devices in threads of their own, so that the control stream stays
    alive. Each device has one thread: trainings on it never overlap. Lives on the event loop."""

    def __init__(
        self, *makes: Callable[[], Device], patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Each of `makes` is called in its thread, at once; what it raises, `run` raises.

        `patience_seconds`: how long what was cancelled may go on.
        """
        self.seats = 0
        """Functions that run side by side."""
        self._patience_seconds = patience_seconds
        self._threads: list[_Thread[Device]] = []
        self._idle: asyncio.Queue[_Thread[Device]] = asyncio.Queue()
        self.add(*makes)

    def add(self, *makes: Callable[[], Device]) -> None:
        """More devices, each of which is made in a thread of its own, at once."""
        for make in makes:
            thread = _Thread(make)
            self._threads.append(thread)
            self._idle.put_nowait(thread)
        self.seats += len(makes)

    async def run(self, function: Callable[[Device], Result]) -> Result:
        """Call `function` with a device, the next that is free after all that was asked before.

        Cancelling takes it from the queue; if it has begun, it goes on, and must notice itself, or
        its thread is left behind.
        """
        thread = await self._idle.get()
        future = self._begin(thread, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            loop.call_later(self._patience_seconds, self._leave_behind, thread, future, None)
            raise

    def prepare(self, function: Callable[[Device], object]) -> None:
        """Call `function` with each device that is idle now. Returns at once; results and errors
        are dropped."""
        for _ in range(self._idle.qsize()):
            self._begin(self._idle.get_nowait(), function)

    def _begin(
        self, thread: _Thread[Device], function: Callable[[Device], Result]
    ) -> Future[Result]:
        """Call `function` in a thread that was idle, which is idle again after it."""
        loop = asyncio.get_running_loop()

        def free(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._free, thread)

        future = thread.submit(function)
        future.add_done_callback(free)
        return future

    def _free(self, thread: _Thread[Device]) -> None:
        if thread in self._threads:
            self._idle.put_nowait(thread)

    def _leave_behind(
        self, thread: _Thread[Device], future: Future[Result], until: float | None
    ) -> None:
        """Interrupt a thread and put another in its place.

        until: when an import that goes on must have ended; None at the first look.
        """
        if future.done() or thread not in self._threads:
            return
        if not thread.interrupt():
            loop = asyncio.get_running_loop()
            if until is None:
                log.info("a cancelled task imports a module; it is interrupted after that")
                until = loop.time() + IMPORT_SECONDS
            if loop.time() < until:
                loop.call_later(_LOOK_SECONDS, self._leave_behind, thread, future, until)
                return
        log.warning(
            "left a thread behind: it goes on with what nobody waits for; see why the task hangs",
            seconds=self._patience_seconds,
        )
        successor = thread.successor()
        self._threads[self._threads.index(thread)] = successor
        self._idle.put_nowait(successor)

    def close(self) -> None:
        """Take everything from the queue; does not wait for what has begun."""
        for thread in self._threads:
            thread.close()
