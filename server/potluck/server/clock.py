"""The clocks of the coordinator."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> float:
    """Monotonic seconds."""
    return time.monotonic()


def utc() -> datetime:
    """The time of day, for people."""
    return datetime.now(UTC)
