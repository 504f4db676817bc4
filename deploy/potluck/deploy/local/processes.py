"""Processes that belong to this one: their output goes to a log, and they end when it does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from potluck.common.errors import RunError
from potluck.deploy.local import tether

GRACE_SECONDS = 5.0
"""How long a process may take to end by itself once it has been told to."""

_LOG_LINES = 5


class LocalProcess(Protocol):
    """A process on this machine, in a process group of its own."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def group(self) -> int:
        """Its process group."""
        ...

    async def ended(self) -> int:
        """Wait until it ends; its exit code."""
        ...

    def exit_reason(self) -> RunError:
        """Why it ended, as far as its log tells."""
        ...

    async def stop(self) -> None:
        """End it, by force if need be. May be called more than once."""
        ...


class TetheredProcess:
    """A command running in a process group of its own, behind `tether.py`."""

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, log: Path) -> Self:
        """Start `command`; `name` stands for it in messages."""
        launcher = [sys.executable, "-I", "-S", tether.__file__, str(GRACE_SECONDS)]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them
            )
        return cls(name, log, process)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self._name

    @property
    def group(self) -> int:
        """Its process group."""
        return self._process.pid

    async def ended(self) -> int:
        """Wait until it ends; its exit code."""
        return await self._process.wait()

    def exit_reason(self) -> RunError:
        """Why it ended, as far as its log tells."""
        return exit_reason(self._name, self._process.returncode, self._log)

    async def stop(self) -> None:
        """End it, by force if need be. May be called more than once."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS + 2.0):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # as a rule nobody is left
            os.killpg(self.group, signal.SIGKILL)
        await self._process.wait()


async def stop_all(processes: Sequence[LocalProcess]) -> None:
    """End them all, at the same time."""
    await asyncio.gather(*(process.stop() for process in processes))


def exit_reason(name: str, code: int | None, log: Path) -> RunError:
    """Why a process ended, as far as its log tells."""
    lines = _last_lines(log)
    said = f"; it last said: {' | '.join(lines)}" if lines else "; it said nothing"
    return RunError(f"{name} ended with exit code {code}{said}; its log is {log}", log=log)


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        text = file.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
