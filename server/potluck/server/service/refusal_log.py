"""Refused calls in the log: a few lines, however many there are."""

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
"""The first refusal of a peer for a reason is logged at once, those that follow together."""

_OWN_FAULTS = (OpenFilesError, RelayStorageError, StorageError)


class RefusalLog:
    """One line for each peer and reason within an interval. Lives on the event loop."""

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._seconds = interval_seconds
        self._more: dict[tuple[str, str], int] = {}  # in the interval under way

    def refused(self, peer: str, method: str, error: PotluckError) -> None:
        """A call was refused for this reason; a warning if the fault is this process's own."""
        write = log.warning if isinstance(error, _OWN_FAULTS) else log.info
        self._log(
            (peer, error.reason),
            lambda: write(
                "call refused", peer=peer, method=method, reason=error.reason, why=error.message
            ),
        )

    def failed(self, peer: str, method: str, error: Exception) -> None:
        """A call failed by a fault of ours."""
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
