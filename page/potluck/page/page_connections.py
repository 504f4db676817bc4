"""Connections to the page's server, bounded: every user of this machine can make some.

A connection on which no request is under way is closed after a while, and the oldest of them make
room for new ones. So whoever holds many open keeps no browser out: one sends its request at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING: Final = 128
"""Connections on which no request is under way."""
WAITING_SECONDS: Final = 10.0
"""After so long without a whole request, such a connection is closed."""
MOST_CONNECTIONS: Final = 512
"""Of all kinds; further requests are answered with 503."""
MOST_STREAMS: Final = 64
"""Event streams of one browser, each of a page that is to be seen."""


class WaitingConnections:
    """Connections on which no request is under way, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._close: dict[object, Callable[[], None]] = {}

    def add(self, connection: object, close: Callable[[], None]) -> None:
        """One waits for a request from now on; where there are too many the oldest is closed."""
        self.remove(connection)
        if len(self._close) >= self._most:
            oldest = next(iter(self._close))
            self._close.pop(oldest)()
        self._close[connection] = close

    def remove(self, connection: object) -> None:
        """A request is under way on one, or it has ended."""
        self._close.pop(connection, None)


def bounded_http(most: int = MOST_WAITING, seconds: float = WAITING_SECONDS) -> type[H11Protocol]:
    """HTTP for one server. most: connections that wait. seconds: for how long they may."""
    waiting = WaitingConnections(most)

    class BoundedHttp(H11Protocol):
        """HTTP/1.1 over connections that may not wait for long."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it so
            """Wait for the first request."""
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Forget it."""
            self._wait_no_more()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            """Serve what has come."""
            super().handle_events()
            if self._under_way():
                self._wait_no_more()

        def on_response_complete(self) -> None:
            """Wait for the next request, unless it has come already."""
            super().on_response_complete()
            if not self._under_way() and not self.transport.is_closing():
                self._wait()

        def _under_way(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self._wait_no_more()
            waiting.add(self, self.transport.abort)
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

        def _wait_no_more(self) -> None:
            waiting.remove(self)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return BoundedHttp


class OpenStreams:
    """Event streams by the browser that listens to them."""

    def __init__(self, most: int) -> None:
        """most: of one browser."""
        self._most = most
        self._open: dict[str, int] = {}

    @contextmanager
    def counted(self, browser: str) -> Iterator[bool]:
        """Count one more while the block runs; False where there are enough of this browser."""
        many = self._open.get(browser, 0)
        if many >= self._most:
            yield False
            return
        self._open[browser] = many + 1
        try:
            yield True
        finally:
            self._open[browser] -= 1
            if not self._open[browser]:
                del self._open[browser]
