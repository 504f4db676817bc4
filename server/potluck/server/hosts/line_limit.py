"""A limit on the log lines that one peer can cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger()

INTERVAL_SECONDS = 30.0
"""Length of an interval in seconds. The first lines about an event are logged immediately, later
ones are counted in one line at the end of the interval."""

_LINES_OF_A_HOST = 10

Event = tuple[str, str]


class LineLimit:
    """Limits the log lines about each event within an interval. Used on the event loop."""

    def __init__(
        self,
        report_more: Callable[[Event, int], None],
        *,
        lines: int = 1,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """report_more: function that logs the number of omitted lines about an event. lines:
        maximum number of lines about an event within an interval."""
        self._report_more = report_more
        self._lines = lines
        self._seconds = interval_seconds
        self._counts: dict[Event, int] = {}
        """Number of lines about each event in its current interval, including omitted ones."""

    def allows(self, event: Event) -> bool:
        """Return True if a line about this event may be logged; otherwise count it."""
        count = self._counts.get(event, 0) + 1
        if count == 1:
            self._begin(event)
        self._counts[event] = count
        return count <= self._lines

    def _begin(self, event: Event) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._end, event)

    def _end(self, event: Event) -> None:
        more = self._counts.pop(event) - self._lines
        if more > 0:
            self._report_more(event, more)
            self._counts[event] = self._lines
            self._begin(event)


def limit_of_hosts(interval_seconds: float = INTERVAL_SECONDS) -> LineLimit:
    """Return a limit for lines about hosts. An event is a line and a host's name.

    All lines about a host that reconnects a few times are logged, but a host that reconnects in a
    loop does not fill the log.
    """
    return LineLimit(_more_of_host, lines=_LINES_OF_A_HOST, interval_seconds=interval_seconds)


def _more_of_host(event: Event, count: int) -> None:
    line, host = event
    log.warning("more lines about a host", host=host, line=line, count=count)
