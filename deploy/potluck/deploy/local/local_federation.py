"""A federation of real processes on this machine, for demos, experiments, tests and benchmarks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Self

from potluck.common.errors import RunError
from potluck.common.net.listening import check_not_in_use
from potluck.deploy.local.demo_files import DemoFiles, program
from potluck.deploy.local.forked_processes import AVAILABLE, ForkedProcesses
from potluck.deploy.local.processes import LocalProcess, TetheredProcess, stop_all
from potluck.deploy.operator.operator_client import OperatorClient, connect

START_SECONDS = 120.0
"""Maximum seconds until the coordinator accepts connections; it mostly imports torch."""

LOOK_SECONDS = 0.03
"""Seconds between two checks of the ready file."""


class LocalFederation:
    """The processes of a federation: one coordinator and some hosts.

    Use it as an asynchronous context manager: call `start` in the block. All processes are ended at
    the end of the block.
    """

    def __init__(
        self,
        files: DemoFiles,
        forks: ForkedProcesses | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a federation from its files, without starting a process.

        forks: fork server for the processes, which stays alive when they end; None: the federation
        starts its own. environment: variables for the processes, in addition to those of this
        process. Processes of a given `forks` have the variables of that fork server instead.
        """
        self.files = files
        self._environment = dict(environment or {})
        self.coordinator: LocalProcess | None = None
        self.hosts: dict[int, LocalProcess] = {}
        self._processes: list[LocalProcess] = []
        self._forked = forks
        self._own_forks = forks is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_all(self._processes)
        if self._forked is not None and self._own_forks:
            await self._forked.close()

    @property
    def processes(self) -> tuple[LocalProcess, ...]:
        """All processes that were started, including those that have ended."""
        return tuple(self._processes)

    async def start_coordinator(self) -> LocalProcess:
        """Start the coordinator; `until_ready` waits until it accepts connections.

        Raises UnreachableError if its port is in use.
        """
        check_not_in_use(tomllib.loads(self.files.coordinator.read_text())["listen"])
        self.files.ready.unlink(missing_ok=True)
        arguments = ["--config", str(self.files.coordinator), "--ready-file", str(self.files.ready)]
        self.coordinator = await self._start(
            "the coordinator", "potluck-server", arguments, "coordinator"
        )
        return self.coordinator

    async def start_host(self, number: int) -> LocalProcess:
        """Start a host."""
        path = self.files.hosts[number]
        arguments = ["--config", str(path)]
        self.hosts[number] = await self._start(path.stem, "potluck-client", arguments, path.stem)
        return self.hosts[number]

    async def start(self) -> None:
        """Start all processes at once and wait until the coordinator accepts connections."""
        await self.start_coordinator()
        for number in range(len(self.files.hosts)):
            await self.start_host(number)
        await self.until_ready()

    async def _start(self, name: str, command: str, arguments: list[str], log: str) -> LocalProcess:
        if AVAILABLE and self._forked is None:
            self._forked = await ForkedProcesses.start(
                self.files.log("fork-server"), self._environment
            )
        path = self.files.log(log)
        process = await start_program(
            name,
            command,
            arguments,
            log=path,
            forks=self._forked,
            environment=self._environment,
        )
        self._processes.append(process)
        return process

    async def until_ready(self) -> int:
        """Wait until the coordinator accepts connections. Return its process id.

        Raises RunError if the coordinator ends before, or takes too long.
        """
        if self.coordinator is None:
            raise RunError("the coordinator has not been started")
        ended = asyncio.create_task(self.coordinator.ended())
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self.files.ready.exists():
                    if ended.done():
                        raise self.coordinator.exit_reason()
                    await asyncio.wait({ended}, timeout=LOOK_SECONDS)
        except TimeoutError:
            raise RunError(
                f"the coordinator does not accept connections after {START_SECONDS:.0f} s; "
                f"see {self.files.log('coordinator')}"
            ) from None
        finally:
            ended.cancel()
        return int(json.loads(self.files.ready.read_text())["pid"])

    @contextlib.asynccontextmanager
    async def operator(self) -> AsyncIterator[OperatorClient]:
        """Yield a connection to the coordinator."""
        async with connect(self.files.operator) as client:
            yield client


async def start_program(
    name: str,
    command: str,
    arguments: list[str],
    *,
    log: Path,
    forks: ForkedProcesses | None,
    environment: Mapping[str, str] | None = None,
) -> LocalProcess:
    """Start a program of this installation, by the fork server if there is one.

    name: used in messages. environment: variables in addition to those of this process; a fork
    server's programs have its variables instead. Raises RunError if the fork server is gone.
    """
    if forks is not None:
        return await forks.fork(name, command, arguments, log=log)
    return await TetheredProcess.start(
        name, [program(command), *arguments], log=log, environment=environment
    )


async def kill(process: LocalProcess) -> None:
    """End a process by SIGKILL, as a crash would, and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.group, signal.SIGKILL)
    await process.ended()
