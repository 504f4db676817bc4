"""Logs refused calls, with a limited number of lines per interval."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from potluck.common.errors import (
    OpenFilesError,
    PotluckError,
    RelayStorageError,
    StorageError,
)

log = structlog.get_logger()

INTERVAL_SECONDS = 30.0
"""Length of an interval in seconds. A peer's first refusal for a reason is logged immediately,
later ones together at the end of the interval."""

_OWN_FAULTS = (OpenFilesError, RelayStorageError, StorageError)


class RefusalLog:
    """Logs one line for each peer and reason within an interval. Used on the event loop."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._seconds = interval_seconds
        self._more: dict[tuple[str, str], int] = {}  # refusals in the current interval

    def refused(self, peer: str, method: str, error: PotluckError) -> None:
        """Log a refused call. It is logged as a warning if this process is the cause."""
        write = log.warning if isinstance(error, _OWN_FAULTS) else log.info
        self._log(
            (peer, error.reason),
            lambda: write(
                "call refused", peer=peer, method=method, reason=error.reason, why=error.message
            ),
        )

    def failed(self, peer: str, method: str, error: Exception) -> None:
        """Log a call that failed because of an error in this process."""
        self._log(
            (peer, type(error).__name__),
            lambda: log.error("call failed", peer=peer, method=method, exc_info=error),
        )

    def _log(self, event: tuple[str, str], write: Callable[[], Any]) -> None:
        if event in self._more:
            self._more[event] += 1
            return
        write()
        self._begin(event)

    def _begin(self, event: tuple[str, str]) -> None:
        self._more[event] = 0
        asyncio.get_running_loop().call_later(self._seconds, self._end, event)

    def _end(self, event: tuple[str, str]) -> None:
        more = self._more.pop(event)
        if more:
            log.info("more calls refused", peer=event[0], reason=event[1], count=more)
            self._begin(event)
