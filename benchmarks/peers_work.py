"""The work that every compared system does, the log that it writes, and the measurements."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_memory import Memory


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of every system."""

    clients: int
    megabytes: float
    rounds: int
    transport: tuple[str, ...]
    timeout: float

    @property
    def parameters(self) -> int:
        """Number of float32 parameters."""
        return int(self.megabytes * 1e6) // 4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Cost of the work on one system: times in seconds, memory in bytes.

    The server's memory is RssAnon, summed over its processes: `server_peak` is its peak,
    `server_private` the part of the peak above the value when the run was submitted.
    """

    version: str
    transport: str
    seconds_median: float
    seconds_min: float
    launch_to_first_round: float
    submit_to_first_round: float
    server_peak: int
    server_private: int
    server_peak_by_process: Mapping[str, int]
    bytes_per_client: float | None


class Notes:
    """The log written by the apps of a compared framework: one JSON object per line, with a time
    of the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read(self, what: str) -> list[dict[str, Any]]:
        """Return the entries of one kind so far."""
        lines = self.path.read_text().split("\n")[:-1]  # the last line may be half written
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def commits(self) -> list[float]:
        """Return the times at which rounds were committed."""
        return [float(note["at"]) for note in self.read("committed")]


def measurement(
    *,
    version: str,
    transport: str,
    launched: float,
    notes: Notes,
    memory: Memory,
    bytes_per_client: float | None,
) -> Measurement:
    """Return the measurement, from notes and samples; the first round warms up and is separate."""
    commits = notes.commits()
    seconds = [after - before for before, after in itertools.pairwise(commits)]
    submitted = float(notes.read("submitted")[0]["at"])
    peak, by_process = memory.peak(submitted, commits[-1])
    return Measurement(
        version=version,
        transport=transport,
        seconds_median=statistics.median(seconds),
        seconds_min=min(seconds),
        launch_to_first_round=commits[0] - launched,
        submit_to_first_round=commits[0] - submitted,
        server_peak=peak,
        server_private=peak - memory.at(submitted),
        server_peak_by_process=by_process,
        bytes_per_client=bytes_per_client,
    )
