"""Server-sent events for any number of pages; each event is encoded once.

If a page reads too slowly, the server drops the page's unread events and sends it the complete
state again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from pydantic import BaseModel

MOST_UNREAD = 200
"""Maximum number of events that wait for one page."""
KEEP_ALIVE_SECONDS = 15.0
FULL_SECONDS = 30
"""Seconds after which a refused page requests the events again."""


def encoded(kind: str, value: BaseModel | None) -> bytes:
    """Return one event with a JSON object, or null."""
    data = "null" if value is None else value.model_dump_json()
    return f"event: {kind}\ndata: {data}\n\n".encode()


def too_many() -> bytes:
    """Return the event for a page that is refused because too many pages listen.

    The page's browser tries again after `FULL_SECONDS`.
    """
    return f"retry: {1000 * FULL_SECONDS}\n".encode() + encoded("full", None)


class Listener:
    """An open page that receives events. all_anew: returns the complete state as events."""

    def __init__(self, all_anew: Callable[[], Iterable[bytes]]) -> None:
        self._all_anew = all_anew
        self._unread: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._behind = True

    def offer(self, event: bytes) -> None:
        """Queue an event; if too many wait, drop the waiting ones and send the complete state
        instead."""
        if self._behind:
            return
        if self._unread.qsize() >= MOST_UNREAD:
            self._behind = True
            while not self._unread.empty():
                self._unread.get_nowait()
            event = b": behind\n\n"
        self._unread.put_nowait(event)

    def close(self) -> None:
        """End the page's stream."""
        self._unread.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events to send to the page, until the stream is closed.

        A comment is sent after `KEEP_ALIVE_SECONDS` without an event.
        """
        while True:
            if self._behind:
                self._behind = False
                for event in self._all_anew():
                    yield event
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    next_event = await self._unread.get()
            except TimeoutError:
                next_event = b": still here\n\n"
            if next_event is None:
                return
            yield next_event
