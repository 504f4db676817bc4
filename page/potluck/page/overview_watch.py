"""The list of runs and the coordinator's state, requested once for all pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from potluck.common.errors import PotluckError
from potluck.page.coordinator_link import CoordinatorLink, PageFaultError
from potluck.page.event_stream import Listener, encoded
from potluck.page.hosts_shown import shown_coordinator
from potluck.page.page_shapes import ConnectionShown, CoordinatorShown, OverviewShown
from potluck.page.run_shown import shown_status
from potluck.page.run_watch import RunWatches
from potluck.rpc.v1 import operator_pb2

POLL_SECONDS = 2.0
"""Seconds between two requests for the list of runs, while a page is open."""
DESCRIBE_SECONDS = 15.0
"""Seconds between two requests for the coordinator's state."""
MOST_RUNS = 500
"""Maximum number of listed runs, the newest ones."""


class OverviewWatch:
    """The overview that every page shows; requested repeatedly while a page is open."""

    def __init__(self, link: CoordinatorLink, watches: RunWatches) -> None:
        self._link = link
        self._watches = watches
        self._listeners: set[Listener] = set()
        self._wanted = asyncio.Event()
        self._runs: list[operator_pb2.RunStatus] = []
        self._coordinator: CoordinatorShown | None = None
        self._described_at = float("-inf")
        self._known = b""
        self._fault: PageFaultError | None = None

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Send events to a page while the block runs."""
        self._listeners.add(listener)
        self._wanted.set()
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def all_anew(self) -> Iterable[bytes]:
        """Return the overview as one event; no event before the coordinator has answered."""
        return [self._known] if self._known else []

    async def now(self) -> OverviewShown:
        """Request the overview from the coordinator and return it."""
        await self._ask()
        return self._shown()

    def hurry(self) -> None:
        """Request the overview at once, because something has changed."""
        self._wanted.set()

    async def poll(self) -> None:
        """Keep all pages up to date until cancelled.

        An error is shown on every page, and the request is repeated.
        """
        while True:
            try:
                await self._look()
            except Exception as error:  # no caller awaits this task: its error would be lost
                self._say_fault(error)
            await self._pause()

    async def _look(self) -> None:
        """Request the overview if a page is open, and drop the watches of unused runs."""
        self._wanted.clear()
        if self._listeners:
            await self._ask()
            event = encoded("overview", self._shown())
            self._fault = None
            self._tell(event)
        await self._watches.tidy()

    def _tell(self, event: bytes) -> None:
        if event != self._known:
            self._known = event
            for listener in self._listeners:
                listener.offer(event)

    def _say_fault(self, error: Exception) -> None:
        """Send a fault to the pages, which then show only the fault.

        A repeated fault is not sent again.
        """
        if self._fault is None or repr(self._fault.__cause__) != repr(error):
            self._fault = PageFaultError.of(error)
            self._fault.__cause__ = error
        connection = ConnectionShown(
            address=self._link.address, reached=False, trouble="fault", text=self._fault.message
        )
        self._tell(
            encoded(
                "overview",
                OverviewShown(connection=connection, coordinator=None, runs=[], more_runs=False),
            )
        )

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self._wanted.wait()

    async def _ask(self) -> None:
        try:
            self._runs = await self._link.call(lambda client: client.list_runs(most=MOST_RUNS))
            now = time.monotonic()
            if now - self._described_at >= DESCRIBE_SECONDS:
                described = await self._link.call(lambda client: client.describe_coordinator())
                self._coordinator = shown_coordinator(described)
                self._described_at = now
        except PotluckError:  # the link has stored the reason
            self._described_at = float("-inf")
        self._watches.noticed(self._runs)

    def _shown(self) -> OverviewShown:
        now = datetime.now(UTC)
        return OverviewShown(
            connection=self._link.shown(),
            coordinator=self._coordinator,
            runs=[shown_status(each, now) for each in self._runs],
            more_runs=len(self._runs) >= MOST_RUNS,
        )

    async def close(self) -> None:
        """End the streams of all pages."""
        for listener in self._listeners:
            listener.close()
