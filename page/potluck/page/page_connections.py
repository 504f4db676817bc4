"""Limits on connections to the web UI's server, since every user of this machine can connect.

An idle connection (without a current request) is closed after a while. If there are too many, the
oldest idle one is closed for a new one. So a program that holds many connections open can't keep a
browser out: a browser sends its request at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_WAITING: Final = 128
"""Maximum number of connections without a current request."""
WAITING_SECONDS: Final = 10.0
"""Seconds without a complete request after which an idle connection is closed."""
MOST_CONNECTIONS: Final = 512
"""Maximum number of connections of all kinds; further requests get status 503."""
MOST_STREAMS: Final = 64
"""Maximum number of event streams per browser, one per visible page."""


class WaitingConnections:
    """Connections without a current request, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._close: dict[object, Callable[[], None]] = {}

    def add(self, connection: object, close: Callable[[], None]) -> None:
        """Add a connection that waits for a request; if there are too many, close the oldest."""
        self.remove(connection)
        if len(self._close) >= self._most:
            oldest = next(iter(self._close))
            self._close.pop(oldest)()
        self._close[connection] = close

    def remove(self, connection: object) -> None:
        """Remove a connection that has a request now, or has ended."""
        self._close.pop(connection, None)


def bounded_http(most: int = MOST_WAITING, seconds: float = WAITING_SECONDS) -> type[H11Protocol]:
    """Return a class for HTTP connections of one server.

    most: maximum number of waiting connections. seconds: for how long each may wait.
    """
    waiting = WaitingConnections(most)

    class BoundedHttp(H11Protocol):
        """HTTP/1.1 on a connection that is closed if it waits too long for a request."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it
            """Wait for the first request."""
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Remove the connection."""
            self._wait_no_more()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            """Serve the received requests."""
            super().handle_events()
            if self._under_way():
                self._wait_no_more()

        def on_response_complete(self) -> None:
            """Wait for the next request, unless it has been received already."""
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
    """Number of event streams by browser."""

    def __init__(self, most: int) -> None:
        """most: maximum number of streams per browser."""
        self._most = most
        self._open: dict[str, int] = {}

    @contextmanager
    def counted(self, browser: str) -> Iterator[bool]:
        """Count one more stream while the block runs; yield False if this browser has too many."""
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
