"""Guards the web UI's server: refuses what `page_access` does not admit, and limits connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from potluck.page.page_access import HEADERS, PageAccess, is_loopback, is_own, other_user
from potluck.page.page_shapes import Refused

# The guard ----------------------------------------------------------------------------------------

MOST_BODY_BYTES = 2_000_000
SESSION = "potluck.page_session"
"""Key of the browser's session in the scope of an admitted request."""
_SAFE = frozenset({"GET", "HEAD"})
_CLOSED = """\
<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Potluck</title><h1>{title}</h1><p>{text}</p></html>
"""
_OPENING = """\
<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=/"><link rel="icon" href="/static/icon.svg">
<title>Potluck</title><p><a href="/">Open the page</a></p></html>
"""


class PageGuard:
    """Wraps the application: admits requests, exchanges tokens for cookies, adds headers."""

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the guard's own response; None if the application handles the request."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not is_loopback(host):
            return _closed(
                scope,
                f"the address {host[:80]!r} is not a name of this machine; open "
                "the address that `potluck page` printed",
            )
        if scope["path"] == "/" and scope["method"] == "GET":
            opening = self._opening(scope)
            if opening is not None:
                return opening
        session = self._access.session(headers.get("cookie", ""))
        if session is None:
            return _closed(
                scope,
                "this browser has no access; open the newest address that `potluck page` "
                "printed. Each address works in one browser; `potluck page` prints a new address "
                "after each use",
            )
        scope[SESSION] = session
        if scope["method"] in _SAFE:
            return None
        if not is_own(headers.get("origin", ""), host):
            return _closed(
                scope, "the request to change data does not come from the web UI; use the web UI"
            )
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _closed(scope, "the request to change data must be JSON")
        length = headers.get("content-length", "")
        # Transfer-Encoding would take precedence over the length, and a body may then have any
        # size.
        sized = length.isdecimal() and "transfer-encoding" not in headers
        if not sized or int(length) > MOST_BODY_BYTES:
            return _closed(
                scope, f"the request is too large; at most {MOST_BODY_BYTES} bytes are allowed"
            )
        return None

    def _opening(self, scope: Scope) -> Response | None:
        """Return the response to a browser that presents the token; None for other requests.

        Finding the connection's user means reading all connections of the machine. So it is done
        only for a request with the token.
        """
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if token is None or not self._access.is_token(token[0]):
            return None
        stranger = other_user(scope["client"], scope["server"])
        if stranger is not None:
            return _closed(
                scope,
                f"the browser's user is {stranger}; open the web UI as the user who runs `potluck "
                "page`",
            )
        # The next request comes from this server's document: the browser sends the strict cookie.
        set_cookie = {"Set-Cookie": self._access.set_cookie(self._access.redeem())}
        return HTMLResponse(_OPENING, headers=set_cookie)


def _closed(scope: Scope, text: str) -> Response:
    """Return a refusal that closes its connection, so that refused programs don't hold it open."""
    close = {"Connection": "close"}
    if scope["path"].startswith("/api/"):
        refused = Refused(error=text, trouble="access").model_dump()
        return JSONResponse(refused, status_code=403, headers=close)
    page = _CLOSED.format(title="Not open to this browser", text=escape(text))
    return HTMLResponse(page, status_code=403, headers=close)


# Limits on connections ----------------------------------------------------------------------------
# An idle connection (without a current request) is closed after a while. If there are too many idle
# connections, a new connection closes the oldest. So a program that holds many connections open
# can't keep a browser out: a browser sends its request at once.

MOST_WAITING: Final = 128
"""Maximum number of connections without a current request."""
WAITING_SECONDS: Final = 10.0
"""Seconds without a complete request after which an idle connection is closed."""
MOST_CONNECTIONS: Final = 512
"""Maximum number of connections of all kinds; further requests get status 503."""
MOST_STREAMS: Final = 64
"""Maximum number of event streams per browser, one per visible page."""


class WaitingConnections:
    """Connections without a current request (idle ones), the oldest first."""

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

    most: maximum number of waiting connections. seconds: maximum wait of each.
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
