"""Sinks that fail at points that a test has named, in the processes that call them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from potluck_crash_points import reach

from potluck.integrations.trackers.table_sinks import CsvFiles
from potluck.server.sink import Sink, TrackedRound, TrackedRun


class Watched(CsvFiles):
    """Reaches `sink-begin` and `sink-written` around each writing."""

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Write between two points."""
        reach("sink-begin")
        super().write(run, rounds)
        reach("sink-written")


class Hanging(Sink):
    """Waits at `sink-hang`."""

    def open(self, run: TrackedRun) -> int:
        """Wait until the test releases the point."""
        reach("sink-hang")
        return run.rounds

    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Do nothing."""


class Dying(Hanging):
    """Kills its process, again and again."""

    def open(self, run: TrackedRun) -> int:
        """Kill the process during its work."""
        os.kill(os.getpid(), signal.SIGKILL)
        return 0
