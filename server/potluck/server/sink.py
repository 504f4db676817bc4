"""The extension point for sinks, which record runs in addition to the coordinator's database.

A sink derives from `Sink`. Its constructor takes its options (from the coordinator's `[sinks.NAME]`
table) as keyword arguments and only stores them; their annotations define the valid values. A sink
runs in its own process, which reads the database and calls the sink from one thread: the sink may
block, and may raise anything. After an error, the sink gets the same rounds again later; training
continues meanwhile.

This process may be killed at any moment. So a sink must not rely on its own notes of what it has
recorded: in `open`, it queries the tracker.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from potluck.common.records.round import Round
from potluck.common.run_file.runfile import stored_values
from potluck.common.settings.plugins import SINKS, Plugin
from potluck.common.tables.round_columns import TableRow, round_row


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run, as sinks see it.

    state: "waiting", "running", "finished", "stopped" or "failed". reason: why the run is in this
    state; may be empty. run_file: text of the run file. rounds: number of rounds to commit.
    changed_at: time of the last state change.
    """

    run_id: str
    name: str
    run_file: str
    task: str
    selector: str
    strategy: str
    rounds: int
    count: int
    seed: int
    created_at: datetime
    state: str
    reason: str
    changed_at: datetime

    @property
    def settings(self) -> dict[str, str]:
        """Return the run file's settings and the settings that every run has, by dotted name."""
        found = {
            "task": self.task,
            "selector": self.selector,
            "strategy": self.strategy,
            "rounds": str(self.rounds),
            "count": str(self.count),
            "seed": str(self.seed),
        }
        return found | _flat(stored_values(self.run_file), "")


@dataclass(frozen=True, kw_only=True)
class TrackedRound(Round):
    """A committed round, with the row and the numbers that trackers record."""

    committed_at: datetime = field()  # a dataclass would otherwise take the default of `Round`

    @property
    def row(self) -> TableRow:
        """Return the row that `potluck export` writes for this round."""
        return round_row(self)

    @property
    def numbers(self) -> dict[str, float]:
        """Return the numbers of `row`, without the round's number."""
        return {
            name: float(value)
            for name, value in self.row.items()
            if name != "round" and not isinstance(value, str)
        }


class Sink(Plugin):
    """Base class of sinks: records runs in a tracker. The module's docstring describes the
    calls."""

    group = SINKS

    library: ClassVar[str] = ""
    """Name of a library that the sink needs and imports in its methods. Its presence is checked
    when the coordinator starts. Empty for none."""
    extra: ClassVar[str] = ""
    """Requirement that installs the library, such as `potluck[mlflow]`; empty for the library's own
    name."""
    alone_in: ClassVar[str] = ""
    """Name of an option for a folder. No other sink of this kind may record in this folder, because
    both would write the same files. The option's default is the sink's own folder, ".". Empty
    without such an option."""
    pause_seconds: float = 0.0
    """Minimum seconds between two calls of `write`. A call gets all rounds committed since the
    previous call."""

    @abstractmethod
    def open(self, run: TrackedRun) -> int | None:
        """Start or resume recording a run. Return the last round that is completely recorded.

        Return 0 if no round is recorded; None if this run must not be recorded. Called once for
        each run in a process, and again after an error.
        """

    @abstractmethod
    def write(self, run: TrackedRun, rounds: Sequence[TrackedRound]) -> None:
        """Record these rounds, at least one, in order. They follow the rounds that are already
        recorded."""

    def end(self, run: TrackedRun) -> None:
        """Finish the record of an ended run, whose rounds are all recorded.

        May be called again, also after more rounds: a stopped run can be resumed.
        """

    def close(self) -> None:
        """Release resources. Called before the process ends, but not if it is killed."""


def _flat(table: Mapping[str, object], prefix: str) -> dict[str, str]:
    """Return the table's values as text, by dotted name."""
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found
