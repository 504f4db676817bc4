"""The clocks of the coordinator."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> float:
    """Return monotonic seconds."""
    return time.monotonic()


def utc() -> datetime:
    """Return the current time in UTC, for records and messages."""
    return datetime.now(UTC)
