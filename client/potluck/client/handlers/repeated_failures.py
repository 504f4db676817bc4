"""Detects that all trainings of this host fail with the same cause.

Such a host is excluded from the run. Otherwise, its clients would be selected until all have
failed.
"""

from __future__ import annotations

import re
import threading
from typing import Final

import structlog

from potluck.common.errors import RepeatedFailureError, StateLostError, TrainingError

log = structlog.get_logger()

LIMIT: Final = 3
"""Number of failures in a row with the same cause after which a host is excluded."""


class RepeatedFailures:
    """Counts failures until a training succeeds. May be used in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause, self._count = "", 0

    def note_success(self) -> None:
        """Reset the count, since a training has succeeded."""
        with self._lock:
            self._cause, self._count = "", 0

    def note(self, error: TrainingError, client: str) -> RepeatedFailureError | None:
        """Count a failure. From the third in a row with the same cause, return the error to raise
        instead; else None.

        Messages that differ only in the client and in numbers count as the same cause.
        """
        if error.permanent or isinstance(error, StateLostError):
            return None  # not counted: the coordinator reacts to the first such failure
        text = error.message.replace(f"'{client}'", "its client")
        cause = re.sub(r"\d+", "#", f"{error.reason} {text}")
        with self._lock:
            self._count = self._count + 1 if cause == self._cause else 1
            self._cause, count = cause, self._count
        if count < LIMIT:
            return None
        log.error(
            "all trainings fail in the same way; reloading tasks and restarting worker processes",
            trainings=count,
            message=error.message,
        )
        return RepeatedFailureError(
            f"the last {count} trainings of this host failed in the same way: {error.message}; "
            "correct the cause, and restart the host"
        )
