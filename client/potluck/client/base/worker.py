"""The threads that compute, one per device: each runs one function at a time, in request order.

A thread can't be stopped from outside. If a cancelled function does not end, its thread is
abandoned and replaced by a new one, so that a host stays usable if a task hangs. A thread that is
importing a module gets time to finish the import.
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

CANCEL_TIMEOUT_SECONDS = 30.0
IMPORT_SECONDS = 300.0
"""Maximum seconds of an import; a thread that takes longer is abandoned without an interrupt."""
_LOOK_SECONDS = 0.1

Device = TypeVar("Device")
Result = TypeVar("Result")


class _Thread(Generic[Device]):
    """A thread with its own device."""

    def __init__(self, make: Callable[[], Device]) -> None:
        self._make = make
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._ident: Future[int] = self._executor.submit(threading.get_ident)
        self._device: Future[Device] = self._executor.submit(make)

    def submit(self, function: Callable[[Device], Result]) -> Future[Result]:
        """Call a function with the device.

        KeyboardInterrupt and SystemExit become a TrainingError, since they would end the event
        loop. In this thread they never come from a signal.
        """

        def call() -> Result:
            try:
                return function(self._device.result())
            except (KeyboardInterrupt, SystemExit) as error:
                raise crashed(error) from error

        return self._executor.submit(call)

    def interrupt(self) -> bool:
        """Raise an exception in the thread's Python code.

        Returns False while the thread imports a module.
        """
        return interrupt(self._ident.result())

    def successor(self) -> _Thread[Device]:
        """Close this thread and return a new one with its own device."""
        self.close()
        return _Thread(self._make)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class Worker(Generic[Device]):
    """Runs functions on devices in separate threads, so that the control stream stays alive. Each
    device has one thread: trainings on it never overlap. Runs on the event loop.
    """

    def __init__(
        self, *makes: Callable[[], Device], cancel_timeout_seconds: float = CANCEL_TIMEOUT_SECONDS
    ) -> None:
        """`makes`: functions that make a device; each is called at once, in its own thread. `run`
        raises what they raise.

        `cancel_timeout_seconds`: maximum time that a cancelled function may continue.
        """
        self.seats = 0
        """Number of functions that can run side by side."""
        self._cancel_timeout_seconds = cancel_timeout_seconds
        self._threads: list[_Thread[Device]] = []
        self._idle: asyncio.Queue[_Thread[Device]] = asyncio.Queue()
        self.add(*makes)

    def add(self, *makes: Callable[[], Device]) -> None:
        """Add devices. Each is created immediately, by its function, in its own thread."""
        for make in makes:
            thread = _Thread(make)
            self._threads.append(thread)
            self._idle.put_nowait(thread)
        self.seats += len(makes)

    async def run(self, function: Callable[[Device], Result]) -> Result:
        """Call `function` with the next free device, after all earlier requests.

        Cancelling removes the request from the queue. A function that has begun continues; it must
        notice the cancellation itself, or its thread is abandoned.
        """
        thread = await self._idle.get()
        future = self._begin(thread, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            loop = asyncio.get_running_loop()
            loop.call_later(self._cancel_timeout_seconds, self._leave_behind, thread, future, None)
            raise

    def prepare(self, function: Callable[[Device], object]) -> None:
        """Call `function` with each device that is idle now. Returns at once; results and errors
        are dropped."""
        for _ in range(self._idle.qsize()):
            self._begin(self._idle.get_nowait(), function)

    def _begin(
        self, thread: _Thread[Device], function: Callable[[Device], Result]
    ) -> Future[Result]:
        """Call `function` in an idle thread; mark the thread idle again afterwards."""
        loop = asyncio.get_running_loop()

        def free(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed
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
        """Interrupt a thread and replace it by another.

        until: time, by the event loop's clock, at which a running import must have ended; None at
        the first call.
        """
        if future.done() or thread not in self._threads:
            return
        if not thread.interrupt():
            loop = asyncio.get_running_loop()
            if until is None:
                log.info(
                    "a cancelled task is still importing a module; it will be interrupted "
                    "afterwards"
                )
                until = loop.time() + IMPORT_SECONDS
            if loop.time() < until:
                loop.call_later(_LOOK_SECONDS, self._leave_behind, thread, future, until)
                return
        log.warning(
            "task ignored cancellation; abandoned its thread, which still runs",
            seconds=self._cancel_timeout_seconds,
        )
        successor = thread.successor()
        self._threads[self._threads.index(thread)] = successor
        self._idle.put_nowait(successor)

    def close(self) -> None:
        """Empty the queue. Does not wait for functions that have begun."""
        for thread in self._threads:
            thread.close()
