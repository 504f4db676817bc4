"""The simulated time of a run whose clients follow a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.common.errors import RunError
from potluck.common.learning.availability_trace import AvailabilityTrace, read_trace
from potluck.common.learning.virtual_clock import VirtualClock


@dataclass(kw_only=True)
class TraceClock:
    """The time of a run on a virtual clock with a trace.

    deadline: simulated seconds that a failed attempt takes. passed: simulated seconds of the
    committed rounds. earliest: time from which the current attempt may begin. begun: time when it
    began. failed: number of failed attempts
    at the current round.
    """

    trace: AvailabilityTrace
    deadline: float
    passed: float = 0.0
    earliest: float = 0.0
    begun: float = 0.0
    failed: int = 0

    def begin(self, clients: Sequence[str], needed: int, *, failed: int) -> Sequence[str]:
        """Begin an attempt at the first simulated time when enough of these clients are available;
        return the available ones.

        needed: minimum number of clients. failed: number of failed attempts at this round; if one
        more than before, the last attempt failed `deadline` seconds after it began. Raises RunError
        if a client is not in the trace, or if too few are ever available.
        """
        unknown = [client for client in clients if client not in self.trace.spans]
        if unknown:
            raise RunError(
                f"virtual_clock.trace has no row of client {unknown[0]} and of "
                f"{len(unknown) - 1} other clients of the run; add rows for these clients"
            )
        if failed > self.failed:
            self.earliest, self.failed = self.begun + self.deadline, failed
        begun = self.trace.next_time(clients, self.earliest, needed)
        if begun is None:
            raise RunError(
                f"virtual_clock.trace never has {needed} of the {len(clients)} clients available "
                "at the same time; lower clients_per_round or round.quorum, or use another trace"
            )
        self.begun = begun
        return [client for client in clients if self.trace.speed(client, begun) > 0.0]

    def ever(self, clients: Sequence[str], needed: int) -> bool:
        """Return True if `needed` of these clients are available at the same time at least once."""
        return self.trace.next_time(clients, 0.0, needed) is not None

    def commit(self, seconds: float) -> None:
        """Record that a round was committed. seconds: simulated seconds since the last commit."""
        self.passed += seconds
        self.earliest, self.failed = self.passed, 0

    def seconds(self, training: float) -> float:
        """Return the simulated seconds of a round: the wait until it began plus `training`."""
        return self.begun - self.passed + training

    def speed(self, client: str) -> float:
        """Return the relative speed of a client that is available when the current attempt
        begins."""
        return self.trace.speed(client, self.begun)

    def arrival(self, client: str, seconds: float) -> float:
        """Return the duration of a training; infinity if the client becomes unavailable before its
        end. seconds: duration if it stays available."""
        return seconds if self.trace.stays(client, self.begun, seconds) else math.inf


def trace_clock(settings: VirtualClock, data: Path | None) -> TraceClock | None:
    """Return the clock for the start of a run; None if its clients follow no trace.

    data: the coordinator's data directory. Raises ConfigurationError if the trace is not valid.
    """
    if not settings.enabled or settings.trace is None:
        return None
    trace = read_trace(settings.trace, data, sha256=settings.trace_sha256)
    return TraceClock(trace=trace, deadline=settings.deadline_seconds or 0.0)
