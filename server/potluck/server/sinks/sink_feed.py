"""Sends a sink the rounds that it has not recorded: queries its last round, and continues from
there.

No clock and no process: `feed` is called again whenever there may be news.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.common.errors import PotluckError
from potluck.server.sink import Sink
from potluck.server.sinks.record_reader import RecordReader, stamp, tracked_run
from potluck.server.store.records import RunRow, RunState
from potluck.server.store.sql.failures import UnreadableRowError

# Notes --------------------------------------------------------------------------------------------
# The notes only save time: without their file, the tracker is queried about every run again. They
# are valid only for the sink's current options; if the options change, all runs are queried again.


class DeliveryNotes:
    """A file with the ids of the completely recorded runs, each with the time at which the run
    ended."""

    def __init__(self, path: Path, options: str) -> None:
        """options: text that identifies the sink's options. Notes that have another text are
        discarded."""
        self._path = path
        self._options = options
        self._runs: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["options"] == options:
                self._runs = {str(run): str(at) for run, at in found["runs"].items()}

    @property
    def runs(self) -> Mapping[str, str]:
        """The noted runs, each with the time at which it ended."""
        return self._runs

    def add(self, run_id: str, changed_at: str) -> None:
        """Note that a run is recorded completely. Disk errors are ignored."""
        self._runs[run_id] = changed_at
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(OSError):
            text = json.dumps({"options": self._options, "runs": self._runs})
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)


# The feed -----------------------------------------------------------------------------------------

AT_ONCE = 100
"""Maximum number of rounds read and sent at once."""

_UNDER_WAY = (RunState.WAITING, RunState.RUNNING)
_LONGEST = 300
_CREDENTIALS = re.compile(r"://[^/\s]+@")


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """The result of one pass over all runs.

    behind: number of committed rounds that the sink has not recorded; None if the database failed.
    errors: error of each run that failed. unreadable: runs with damaged rows, each with the reason
    why it is omitted; retries don't help. ahead: runs of which the sink had more rounds than the
    database, each with these rounds; an older backup of the database was restored.
    """

    behind: int | None
    errors: Mapping[str, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, str] = field(default_factory=dict)


class SinkFeed:
    """Feeds one sink. Blocking; for use in one thread."""

    def __init__(
        self,
        reader: RecordReader,
        sink: Sink,
        notes: DeliveryNotes,
        still_there: Callable[[], None] = lambda: None,
    ) -> None:
        """still_there: function called between two calls of the sink, each of which may take long.
        It reports to the coordinator that the process is alive."""
        self._reader = reader
        self._sink = sink
        self._notes = notes
        self._still_there = still_there
        self._last: dict[str, int | None] = {}
        self._reached: dict[str, int] = {}  # by run, the last round that the sink is known to have
        self._ahead: dict[str, str] = {}

    def feed(self) -> PassResult:
        """Send the sink everything that has been committed. Raises StorageError.

        If the sink refuses a run, or a run can't be read, the other runs are still sent.
        """
        errors: dict[str, str] = {}
        behind = 0
        found = self._reader.runs(self._notes.runs)
        unreadable = dict(found.unreadable)
        for row in found.rows:
            self._still_there()
            try:
                self._feed_run(row)
            except UnreadableRowError as error:
                unreadable[row.run_id] = explained(error)
                behind += max(row.committed_rounds - self._reached.get(row.run_id, 0), 0)
            except Exception as error:  # a tracker's library may raise anything
                self._last.pop(row.run_id, None)  # query the sink again
                errors[row.run_id] = explained(error)
                behind += max(row.committed_rounds - self._reached.get(row.run_id, 0), 0)
        return PassResult(
            behind=behind, errors=errors, unreadable=unreadable, ahead=dict(self._ahead)
        )

    def _feed_run(self, row: RunRow) -> None:
        run = tracked_run(row)
        if row.run_id not in self._last:
            self._last[row.run_id] = self._sink.open(run)
        last = self._last[row.run_id]
        if (last or 0) > row.committed_rounds:
            self._ahead.setdefault(row.run_id, f"rounds {row.committed_rounds + 1} to {last}")
        self._reached[row.run_id] = last or 0
        while last is not None:
            rounds = self._reader.rounds(row.run_id, after=last, limit=AT_ONCE)
            if not rounds:
                break
            self._sink.write(run, rounds)
            self._last[row.run_id] = self._reached[row.run_id] = last = rounds[-1].number
            self._still_there()
        if row.state not in _UNDER_WAY:
            if last is not None:
                self._sink.end(run)
            del self._last[row.run_id], self._reached[row.run_id]
            self._notes.add(row.run_id, stamp(row))


def explained(error: Exception) -> str:
    """Return one line for a tracker library's error; passwords in addresses are removed."""
    said = error.message if isinstance(error, PotluckError) else str(error)
    text = _CREDENTIALS.sub("://***@", " ".join(said.split()))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if isinstance(error, PotluckError):
        return shown
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
