"""Starts, watches and ends the processes of a compared framework. Linux only: reads /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

from peers_memory import pids, read

from potluck.common.errors import RunError
from potluck.deploy.local.fork_server import GRACE_SECONDS
from potluck.deploy.local.processes import TetheredProcess, stop_all

MARK = "POTLUCK_PEERS"
"""Environment variable that marks the processes of one measurement."""

LOOK_SECONDS = 0.03


class Programs:
    """The processes of one compared system; ends them, including their descendants.

    Some peers put children into separate sessions, which a process group does not reach. All
    children inherit the environment, so a marker variable identifies them.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._processes: list[TetheredProcess] = []

    async def start(
        self, name: str, command: Sequence[str], environment: Iterable[str] = ()
    ) -> TetheredProcess:
        """Start `command` with `environment` (`NAME=VALUE`) added; its output goes to NAME.log."""
        settings = [self._mark, f"TMPDIR={self.folder}", *environment]
        process = await TetheredProcess.start(
            name, ["env", *settings, *command], log=self.folder / f"{name}.log"
        )
        self._processes.append(process)
        return process

    def log(self, name: str) -> str:
        """Return the output of a process so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    async def end(self) -> None:
        """End all started processes."""
        await stop_all(self._processes)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._marked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            for _ in range(int(GRACE_SECONDS / LOOK_SECONDS)):
                if not self._marked():
                    return
                await asyncio.sleep(LOOK_SECONDS)

    def pids(self) -> list[int]:
        """Return the ids of the benchmark's running processes."""
        return self._marked()

    def _marked(self) -> list[int]:
        return [pid for pid in pids() if self._mark.encode() in read(pid, "environ")]


def processor_seconds(processes: Iterable[int]) -> float:
    """Return the processor seconds of processes so far, including their ended children."""
    ticks = 0
    for pid in processes:
        fields = read(pid, "stat").rpartition(b")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return the processor seconds of all processes since the machine's start.

    Includes the time that the hypervisor gave to other machines.
    """
    user, nice, system, _idle, _waiting, *others = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def programs_in(folder: Path) -> AsyncIterator[Programs]:
    """Yield `Programs` with logs in a folder; end its processes at the end of the block."""
    running = Programs(folder)
    try:
        yield running
    finally:
        await asyncio.shield(running.end())


async def until(
    done: Callable[[], bool],
    *,
    what: str,
    patience: float,
    lasting: Sequence[TetheredProcess] = (),
    passing: Sequence[TetheredProcess] = (),
) -> None:
    """Wait until `done` returns True.

    Raises RunError if that takes more than `patience` seconds, if a `lasting` process ends, or if a
    `passing` process ends with an error.
    """
    ends = {asyncio.create_task(process.ended()): process for process in [*lasting, *passing]}
    deadline = time.monotonic() + patience
    try:
        while not done():
            for task, process in ends.items():
                if task.done() and (process in lasting or task.result()):
                    raise process.exit_reason()
            if time.monotonic() > deadline:
                raise RunError(f"{what} took more than {patience:.0f} s; raise --timeout")
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for task in ends:
            task.cancel()
