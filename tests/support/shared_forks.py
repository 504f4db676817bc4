"""A fork server for all federations of one pytest worker: modules are imported once, not for each.

Each test has its own event loop, and the fork server's connection belongs to one. So a thread keeps
the connection, in its own event loop, from the first request to the end of the session.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from potluck.deploy.local.forked_processes import AVAILABLE, ForkedProcess, ForkedProcesses

_Result = TypeVar("_Result")


class _Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine there; return its result to the caller's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def run_now(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine there and block until it is done."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _SharedProcess(ForkedProcess):
    """A forked process whose end is reported in another event loop."""

    def __init__(self, process: ForkedProcess, log: Path, loop: _Loop) -> None:
        super().__init__(process.name, log, process.group)
        self._process = process
        self._there = loop

    @property
    @override
    def exit_code(self) -> int | None:
        return self._process.exit_code

    @override
    async def ended(self) -> int:
        return await self._there.run(self._process.ended())

    @override
    async def stop(self) -> None:
        await self._there.run(self._process.stop())


class SharedForks(ForkedProcesses):
    """Requests processes from one fork server, from any event loop. It ends with the session."""

    def __init__(self) -> None:  # the base class's would need this thread's event loop
        self._there = _Loop()
        self._folder = Path(tempfile.mkdtemp(prefix="potluck-forks-"))
        log = self._folder / "fork-server.log"
        # Use one thread per process: tests train small models, and share the processors with other
        # tests.
        environment = {"OMP_NUM_THREADS": "1"}
        with pytest.MonkeyPatch.context() as patch:
            # Other tests must not find this test's plug-ins.
            patch.delenv("PYTHONPATH", raising=False)
            self._forks = self._there.run_now(ForkedProcesses.start(log, environment))

    @property
    @override
    def alive(self) -> bool:
        return self._forks.alive

    @override
    async def fork(
        self, name: str, program: str, arguments: Sequence[str], *, log: Path
    ) -> ForkedProcess:
        fork = self._forks.fork(name, program, arguments, log=log)
        return _SharedProcess(await self._there.run(fork), log, self._there)

    @override
    async def close(self) -> None:
        """Do nothing: other federations use the fork server, too."""

    def end(self) -> None:
        """End the fork server and all processes that it forked."""
        self._there.run_now(self._forks.close())
        self._there.close()
        shutil.rmtree(self._folder)


_started: list[SharedForks] = []


def shared_forks() -> SharedForks | None:
    """Return this process's fork server; start it if none is alive. None if forks are not
    available."""
    if AVAILABLE and not (_started and _started[-1].alive):
        _started.append(SharedForks())
    return _started[-1] if _started else None


def end_shared_forks() -> None:
    """End the fork server, if there is one."""
    while _started:
        _started.pop().end()
