"""Processes that start at once: `fork_server.py` forks them, and has already imported torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from typing_extensions import override

from potluck.deploy.local.fork_server import GRACE_SECONDS
from potluck.deploy.local.processes import LocalProcess, exit_reason

AVAILABLE = sys.platform == "linux"
"""True on Linux. Elsewhere, some system libraries can't be used after a fork."""


class ForkedProcess(LocalProcess):
    """A forked program in its own process group.

    It ends when its fork server ends, and the fork server ends when this process ends.
    """

    def __init__(self, name: str, log: Path, pid: int) -> None:
        super().__init__(name, log, pid)
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    @override
    def exit_code(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def set_ended(self, code: int) -> None:
        """Store the exit code that the fork server reports."""
        if not self._code.done():
            self._code.set_result(code)

    @override
    async def ended(self) -> int:
        return await asyncio.shield(self._code)

    @override
    async def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._code.done():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.group, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await self.ended()


class ForkedProcesses:
    """Client of a fork server: requests processes from it, and receives their exit codes."""

    def __init__(
        self,
        server: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.server = server
        self._environment = environment
        self._writer = writer
        self._log = log
        self._asked: deque[asyncio.Future[int]] = deque()
        self._processes: dict[int, ForkedProcess] = {}
        self._ended: dict[int, int] = {}
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(cls, log: Path, environment: Mapping[str, str] | None = None) -> Self:
        """Start the fork server; its own output goes to `log`.

        environment: variables for it and its forks, in addition to those of this process.
        """
        environment = dict(environment or {})
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            server = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "potluck.deploy.local.fork_server"),
                *(str(theirs.fileno()), str(log.parent)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends them
                env={**os.environ, **environment},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(server, reader, writer, log, environment)

    @property
    def alive(self) -> bool:
        """True if the fork server still accepts requests."""
        return not self._listening.done()

    async def fork(
        self, name: str, program: str, arguments: Sequence[str], *, log: Path
    ) -> ForkedProcess:
        """Start one of the programs in `fork_server.PROGRAMS`. name: used in messages.

        Raises RunError if the fork server is gone.
        """
        request = {
            "program": program,
            "arguments": list(arguments),
            "log": str(log),
            "environment": {**os.environ, **self._environment},
        }
        asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            if not self.alive:
                raise ConnectionResetError
            self._asked.append(asked)
            self._writer.write(json.dumps(request).encode() + b"\n")
            pid = await asked
        except ConnectionError:
            code = await self.server.wait()
            raise exit_reason("the fork server", code, self._log) from None
        process = self._processes[pid] = ForkedProcess(name, log, pid)
        if pid in self._ended:
            process.set_ended(self._ended.pop(pid))
        return process

    async def close(self) -> None:
        """End the server and all processes that it forked."""
        self._writer.close()
        try:
            async with asyncio.timeout(2 * GRACE_SECONDS):
                await self.server.wait()
        except TimeoutError:
            self.server.kill()
            await self.server.wait()
        await self._listening

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._hear(json.loads(line))
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ConnectionResetError())
        for process in self._processes.values():
            if not self._writer.is_closing():  # the server ended and can't end its processes
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.group, signal.SIGKILL)
            process.set_ended(128 + signal.SIGKILL)

    def _hear(self, reply: dict[str, int]) -> None:
        if "begun" in reply:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(reply["begun"])
            return
        pid = reply["ended"]
        if pid in self._processes:
            self._processes.pop(pid).set_ended(reply["code"])
        else:
            self._ended[pid] = reply["code"]
