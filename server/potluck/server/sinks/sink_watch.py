"""The coordinator's side of a sink's process: starts and notifies the process, and restarts it if
it ends.

Used on the event loop, which never waits for a sink.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

import structlog

from potluck.common.monitoring.definitions import SINK_BEHIND, SINK_UP
from potluck.common.monitoring.instruments import Instruments
from potluck.server.sinks.sink_job import SinkJob
from potluck.server.sinks.sink_process import FINISH, NEWS, OUTPUT, SinkReport, cut, pause_seconds

log = structlog.get_logger()

_FINISH_SECONDS = 1.5
"""Seconds that a sink has to record the last rounds when the coordinator stops. Rounds that it
can't record in time are recorded after a restart."""


class SinkProcess:
    """Supervises the process of one sink."""

    def __init__(self, job: SinkJob, instruments: Instruments) -> None:
        self._job = job
        self._instruments = instruments
        self._log = log.bind(sink=job.name)
        self._process: asyncio.subprocess.Process | None = None
        self._told = False  # True if the process has not handled a notification yet
        self._more = False  # True if there is news since that notification
        self._busy = True
        self._failures = 0
        self._trouble = ""
        self._unreadable = ""
        self._ahead = ""
        self._closing = False
        self._show(up=False)

    def tell(self) -> None:
        """Notify the process that there may be something to record."""
        if self._told:
            self._more = True  # sent after this pass: a hanging sink must not fill the pipe
            return
        if self._send(NEWS):
            self._told = True

    async def run(self) -> None:
        """Keep a process running until `close` is called; restart it if it ends."""
        while not self._closing:
            reason = await self._one_process()
            if self._closing:
                return
            self._failures += 1
            self._trouble_is(reason)
            self._show(up=False)
            await asyncio.sleep(pause_seconds(self._failures))

    async def close(self) -> None:
        """Give the process a short time to record the last rounds, then end it."""
        self._closing = True
        if self._process is None:
            return
        self._send(FINISH)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_SECONDS):
                await self._process.wait()

    async def _one_process(self) -> str:
        """Start a process and read its output until it ends; return why it ended."""
        job = self._job
        try:
            job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            cut(job.folder)
            with (job.folder / OUTPUT).open("ab") as output:  # append, to keep earlier output
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "potluck.server.sinks.sink_process",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,  # a terminal's signals must only reach the coordinator
                )
        except OSError as error:
            return (
                f"the sink's process can't be started: {error.filename or job.folder}: "
                f"{error.strerror}"
            )
        self._process, self._told, self._more, self._busy = process, True, False, True
        try:
            self._send(job.model_dump_json().encode() + b"\n")
            return await self._hear(process)
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()
            if process.stdin is not None:
                process.stdin.close()

    async def _hear(self, process: asyncio.subprocess.Process) -> str:
        if process.stdout is None:
            return "the sink's process has no pipe"
        said = ""
        while True:
            limit = self._job.silence_timeout_seconds if self._busy else None
            try:
                async with asyncio.timeout(limit):
                    line = await process.stdout.readline()
            except TimeoutError:
                return (
                    f"the sink's process was silent for {limit:g} s during its work, and was killed"
                )
            except ValueError:  # the line is too long for asyncio
                return "the sink's process wrote an invalid report, and was killed"
            if not line:
                code = await process.wait()
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                return said or f"the sink's process ended: {how}; see {self._job.folder / OUTPUT}"
            try:
                report = SinkReport.model_validate_json(line)
            except ValueError:  # the process was killed within a line
                continue
            said = report.trouble
            self._take(report)

    def _take(self, report: SinkReport) -> None:
        if report.began:
            self._busy, self._told = True, False
            if self._more:
                self._more = False
                self.tell()
        if report.ended:
            self._busy = False
            self._trouble_is(report.trouble)
            self._unreadable_are(report.unreadable)
            self._ahead_are(report.ahead)
            self._show(up=not report.trouble, behind=report.behind)
            if not report.trouble:
                self._failures = 0

    def _trouble_is(self, trouble: str) -> None:
        """Log the sink's trouble when it changes; an unchanged trouble is logged only once."""
        if trouble and trouble != self._trouble:
            self._log.warning("sink does not record; trying again", reason=trouble)
        elif self._trouble and not trouble:
            self._log.info("sink records again")
        self._trouble = trouble

    def _unreadable_are(self, unreadable: str) -> None:
        """Log which runs the sink can't record; an unchanged text is logged only once."""
        if unreadable and unreadable != self._unreadable:
            self._log.error("sink omits runs that can't be read", reason=unreadable)
        self._unreadable = unreadable

    def _ahead_are(self, ahead: str) -> None:
        """Log which rounds the sink has from before a restore; an unchanged text is logged only
        once."""
        if ahead and ahead != self._ahead:
            self._log.warning(
                "sink has rounds that the database lacks",
                rounds=ahead,
                remedy="the sink does not record these rounds again; remove the run from the "
                "tracker, as docs/operate/backup.md describes",
            )
        self._ahead = ahead

    def _show(self, *, up: bool, behind: int | None = None) -> None:
        self._instruments.set(SINK_UP, up, sink=self._job.name)
        if behind is not None:
            self._instruments.set(SINK_BEHIND, behind, sink=self._job.name)

    def _send(self, data: bytes) -> bool:
        """Send bytes to the process. Return False if no process is running."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        with contextlib.suppress(OSError):
            process.stdin.write(data)
        return True


class Sinks:
    """Starts, notifies and ends the processes of all sinks of a coordinator."""

    def __init__(self, jobs: Sequence[SinkJob], instruments: Instruments) -> None:
        self._sinks = [SinkProcess(job, instruments) for job in jobs]
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the sinks' processes in the background."""
        self._tasks = [asyncio.create_task(sink.run()) for sink in self._sinks]

    def tell(self) -> None:
        """Notify all sinks that a round was committed, or that a run has started or ended."""
        for sink in self._sinks:
            sink.tell()

    async def close(self) -> None:
        """End the sinks' processes."""
        await asyncio.gather(*(sink.close() for sink in self._sinks))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
