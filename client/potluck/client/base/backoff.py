"""Pauses between attempts of an operation that fails."""

from __future__ import annotations

import random
from dataclasses import dataclass


def backoff_seconds(attempt: int, *, first: float, maximum: float, jitter: float) -> float:
    """Return the seconds to wait before retry number `attempt` (from 0).

    The pause is first · 2^attempt, at most `maximum`, shortened by up to half as `jitter` in [0, 1)
    goes from 0 to 1. So hosts that lost the coordinator at the same time don't reconnect at the
    same time, and every host waits at least half the full pause.
    """
    # Limit the exponent: 2.0**attempt overflows above 1023, and 63 doublings reach any maximum.
    return float(min(maximum, first * 2.0 ** min(attempt, 63)) * (1.0 - jitter / 2.0))


@dataclass
class Backoff:
    """The pauses of one series of attempts; `generator` draws the jitter."""

    generator: random.Random
    first: float = 0.1
    maximum: float = 5.0
    attempt: int = 0

    def next_seconds(self) -> float:
        """Return the next pause and count the attempt."""
        seconds = backoff_seconds(
            self.attempt, first=self.first, maximum=self.maximum, jitter=self.generator.random()
        )
        self.attempt += 1
        return seconds

    def reset(self) -> None:
        """Start the next series at the first pause; call this after an attempt has succeeded."""
        self.attempt = 0
