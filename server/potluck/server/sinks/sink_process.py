"""The process of one sink: reads the database and calls the sink. Run it as a module.

Standard input has the job as a line of JSON, then one byte for each notification, and the byte `f`
to finish. It is open as long as the coordinator runs; when it is closed, the process ends. Standard
output has lines of JSON, see `SinkReport`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from potluck.common.errors import PotluckError
from potluck.common.tensors.digest import digest_of
from potluck.server.sinks.record_reader import RecordReader
from potluck.server.sinks.sink_feed import DeliveryNotes, PassResult, SinkFeed, explained
from potluck.server.sinks.sink_job import SinkJob, make_sink

# The output ---------------------------------------------------------------------------------------

OUTPUT: Final = "output.log"
"""Name of the file in the sink's folder. Libraries write their output to it, in append mode, so
after it is emptied, they write at its new end."""
EARLIER: Final = "output.log.1"
MOST_BYTES: Final = 1_000_000


def cut(folder: Path, most: int = MOST_BYTES) -> None:
    """Empty the file `OUTPUT` in this folder if it is longer than `most` bytes.

    Its last `most // 2` bytes are first copied to the file `EARLIER`, which is overwritten. Disk
    errors are ignored.
    """
    path = folder / OUTPUT
    with contextlib.suppress(OSError):
        if path.stat().st_size <= most:
            return
        with path.open("rb") as file:
            file.seek(-(most // 2), os.SEEK_END)
            (folder / EARLIER).write_bytes(file.read(most // 2))
        os.truncate(path, 0)


# The process --------------------------------------------------------------------------------------

NEWS: Final = b"n"
FINISH: Final = b"f"

FAILED: Final = 3
"""Exit code after a failure whose reason is in the last line of output."""
_GONE: Final = 4
_LOOK_SECONDS: Final = 60.0
"""Maximum seconds between checks for news, which are made even without a message from the
coordinator."""
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_NAMED: Final = 3
"""Maximum number of runs that a report names."""
_NICENESS: Final = 10
"""Niceness of the process, so that training has precedence."""


class SinkReport(BaseModel):
    """A line of output, with the state of a pass over all runs; once the pass is finished, also
    with its errors.

    behind: number of rounds that the sink has not recorded; None if the database failed.
    unreadable: reason why runs are omitted; empty if none are. ahead: rounds that the sink had and
    the database lacked; empty if there are none.
    """

    began: bool = False
    ended: bool = False
    behind: int | None = None
    trouble: str = ""
    unreadable: str = ""
    ahead: str = ""


class Told:
    """The coordinator's notifications, which a thread reads from standard input."""

    def __init__(self) -> None:
        self._news = threading.Event()
        self._finish = threading.Event()

    @property
    def to_finish(self) -> bool:
        """True if the coordinator has asked the process to end."""
        return self._finish.is_set()

    def listen(self, descriptor: int) -> None:
        """Read bytes until the coordinator closes the pipe; then end the process immediately."""
        while data := os.read(descriptor, 1024):
            if FINISH in data:
                self._finish.set()
            self._news.set()
        os._exit(_GONE)

    def await_news(self, seconds: float) -> None:
        """Wait for news, but at most `seconds`."""
        self._news.wait(seconds)

    def take_news(self) -> None:
        """Mark all news received up to now as seen."""
        self._news.clear()

    def pause(self, seconds: float) -> None:
        """Wait for this time, but return immediately if the process must end."""
        self._finish.wait(seconds)


def main() -> int:
    """Feed one sink until the coordinator sends `f`. Return the exit code."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # libraries may print, but the reports need standard output
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**values: bool | int | str | None) -> None:
        cut(job.folder)
        answers.write(
            SinkReport.model_validate(values).model_dump_json(exclude_defaults=True) + "\n"
        )

    with os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0) as first_line:
        job = SinkJob.model_validate_json(first_line.readline())
    told = Told()
    threading.Thread(target=told.listen, args=(sys.stdin.fileno(),), daemon=True).start()
    os.nice(_NICENESS)
    try:
        reader = RecordReader(job.database)  # before chdir: the database's path may be relative
        os.chdir(job.folder)
        with (job.folder / "lock").open("w") as lock:
            # Wait for the sink process of a killed coordinator, which may still be writing.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _feed(job, reader, told, answer)
    except PotluckError as error:
        answer(trouble=error.message)
        return FAILED
    except Exception as error:
        answer(trouble=explained(error))
        raise
    return 0


def _feed(job: SinkJob, reader: RecordReader, told: Told, answer: Callable[..., None]) -> None:
    sink = make_sink(job)
    options = digest_of(f"{job.plugin} {sorted(job.options.items())}".encode())
    notes = DeliveryNotes(Path("delivered.json"), options)
    feed = SinkFeed(reader, sink, notes, still_there=answer)
    failures = 0
    while True:
        told.take_news()
        finishing = told.to_finish
        answer(began=True)
        result = _pass(feed)
        answer(
            ended=True,
            behind=result.behind,
            trouble=summed_up(result.errors),
            unreadable=summed_up(result.unreadable),
            ahead=summed_up(result.ahead),
        )
        if finishing:
            sink.close()
            return
        failures = failures + 1 if result.errors else 0
        if failures:
            told.pause(pause_seconds(failures))
        else:
            told.await_news(_LOOK_SECONDS)
            told.pause(sink.pause_seconds)


def _pass(feed: SinkFeed) -> PassResult:
    """Run one pass. If the database fails, report only its error."""
    try:
        return feed.feed()
    except PotluckError as error:
        return PassResult(behind=None, errors={"": error.message})


def summed_up(errors: Mapping[str, str]) -> str:
    """Return one line about the runs that could not be recorded. errors: by run; the key "" is for
    all runs.

    If a tracker is down, every run fails. Only the first runs are named, to limit the length.
    """
    shown = [f"run {run}: {why}" if run else why for run, why in islice(errors.items(), _NAMED)]
    more = len(errors) - len(shown)
    return "; ".join([*shown, *([f"and {more} more runs"] if more else [])])


def pause_seconds(failures: int) -> float:
    """Return the seconds to pause after `failures` failures in a row (at least 1)."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 30))


if __name__ == "__main__":
    sys.exit(main())
