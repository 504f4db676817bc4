"""Child processes whose output goes to a log and which end when this process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from typing_extensions import override

from potluck.common.errors import RunError
from potluck.deploy.local import tether
from potluck.deploy.local.fork_server import GRACE_SECONDS

_LOG_LINES = 5


class LocalProcess(ABC):
    """A process on this machine, in its own process group.

    name: used in messages. group: the process group's id. log: path of the file with its output.
    """

    def __init__(self, name: str, log: Path, group: int) -> None:
        self.name = name
        self.group = group
        self._log = log

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs."""

    @abstractmethod
    async def ended(self) -> int:
        """Wait until the process ends. Return its exit code."""

    @abstractmethod
    async def stop(self) -> None:
        """End the process, by SIGKILL if necessary. May be called more than once."""

    def exit_reason(self) -> RunError:
        """Return the error that reports the end of the process, with the last lines of its log."""
        return exit_reason(self.name, self.exit_code, self._log)


class TetheredProcess(LocalProcess):
    """A command in its own process group, started by `tether.py`."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        super().__init__(name, log, process.pid)
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start `command`.

        name: used in messages. environment: variables for it, in addition to those of this process.
        """
        launcher = [sys.executable, "-I", "-S", tether.__file__, str(GRACE_SECONDS)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them
                env={**os.environ, **(environment or {})},
            )
        return cls(name, log, process)

    @property
    @override
    def exit_code(self) -> int | None:
        return self._process.returncode

    @override
    async def ended(self) -> int:
        return await self._process.wait()

    @override
    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS + 2.0):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # usually no process is left in the group
            os.killpg(self.group, signal.SIGKILL)
        await self._process.wait()


async def stop_all(processes: Sequence[LocalProcess]) -> None:
    """End all processes, at the same time."""
    await asyncio.gather(*(process.stop() for process in processes))


def exit_reason(name: str, code: int | None, log: Path) -> RunError:
    """Return the error for the end of a process, with the last lines of its log."""
    lines = _last_lines(log)
    said = f"; its last output: {' | '.join(lines)}" if lines else ", without output"
    return RunError(f"process {name} ended with exit code {code}{said}; see the log {log}", log=log)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
