"""The latest view of a run, kept up to date on the background loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self

from potluck.common.errors import PotluckError, RunError
from potluck.deploy.operator.run_view import RunView
from potluck.deploy.view.watch_lines import status_line
from potluck.federation.rounds import Round, round_of
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import RunState

MOMENT_SECONDS = 0.2
"""Pause between two drawings of a run in a notebook."""


class RunFollower:
    """The display that `follow` updates: keeps a run's newest view and wakes waiting callers.

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
        """Store the newest view, and the notice if the event is one."""
        self.view = view
        if event.WhichOneof("event") == "notice":
            self.notices.append(event.notice.text)
        self._wake()

    def connection(self, text: str, *, lost: bool) -> None:
        """Store a notice that the connection to the coordinator was lost or restored."""
        del lost
        self.notices.append(text)

    def begin(self, following: Coroutine[Any, Any, RunView]) -> None:
        """Follow a run. `following` calls `show` and `connection`, and ends with the run."""
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
        """Wait for a round to be committed and return it; None if the run ended before.

        Raises RunError if the run failed, or the error that following it raised.
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
