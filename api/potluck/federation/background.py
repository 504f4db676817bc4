"""An event loop in its own thread, for callers without an event loop or inside another.

A notebook's cells already run inside an event loop, where waiting needs `await`. Coroutines that
connect to a federation run on this loop instead, and callers wait for them in their own thread.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from potluck.common.errors import PotluckError, RunError
from potluck.deploy.operator.run_view import RunView
from potluck.deploy.view.watch_lines import status_line
from potluck.federation.rounds import Round, round_of
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

# The loop -----------------------------------------------------------------------------------------

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines on a loop of its own; use `background_loop()`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="potluck", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the loop runs; False in a process that was forked from the one that made it."""
        return self._thread.is_alive()

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
    """Wait until tasks that were cancelled earlier have run their clean-up."""
    await asyncio.sleep(0)


@functools.cache
def background_loop() -> BackgroundLoop:
    """Return the only loop of this process: gRPC works with one loop per process."""
    return BackgroundLoop()


# The view of a run --------------------------------------------------------------------------------

MOMENT_SECONDS = 0.2
"""Seconds between two drawings of a run in a notebook."""


class RunFollower:
    """A display for `follow`: stores a run's newest view and wakes callers that wait for it.

    All methods run on the background loop.
    """

    def __init__(self) -> None:
        self.view = RunView()
        self.notices: list[str] = []
        self._error: PotluckError | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._version = 1
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def show(self, view: RunView, event: operator_pb2.WatchRunResponse) -> None:
        """Store the newest view; if the event is a notice, store the notice as well."""
        self.view = view
        if event.WhichOneof("event") == "notice":
            self.notices.append(event.notice.text)
        self._wake()

    def connection(self, text: str, *, lost: bool) -> None:
        """Store a notice that the connection to the coordinator was lost or restored."""
        del lost
        self.notices.append(text)

    def begin(self, following: Coroutine[Any, Any, RunView]) -> None:
        """Follow a run. The task calls `show` and `connection`, and ends with the run."""
        self._error, self._over = None, False
        self._task = asyncio.create_task(self._follow(following))

    async def _follow(self, following: Coroutine[Any, Any, RunView]) -> None:
        try:
            self.view = await following
        except PotluckError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = RunError("the federation was closed before the run ended")
        finally:
            self._over = True
            self._wake()

    def _wake(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop following the run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def round(self, number: int) -> Round | None:
        """Wait until a round is committed and return it; None if the run ends before.

        Raises RunError if the run failed, or the error that stopped the following.
        """
        while number not in self.view.committed:
            if self._over:
                self._raise_failure()
                return None
            await self._changed.wait()
        return round_of(self.view.committed[number])

    async def news(self, version: int) -> int:
        """Wait until the view is newer than `version`, then MOMENT_SECONDS for further changes.

        Return the new version; 0 if the run has ended.
        """
        while not self._over and self._version == version:
            await self._changed.wait()
        if not self._over:
            await asyncio.sleep(MOMENT_SECONDS)
        return 0 if self._over else self._version

    async def end(self) -> None:
        """Wait until the run has ended. Raises as `round` does."""
        while not self._over:
            await self._changed.wait()
        self._raise_failure()

    async def rounds(self) -> list[Round]:
        """Return the rounds committed by now, in order."""
        return [round_of(committed) for committed in self.view.rounds]

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        status = self.view.status
        if status is not None and status.state == RunState.RUN_STATE_FAILED:
            raise RunError(status_line(status))
