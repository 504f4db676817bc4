"""One host of a cell on its own machine, and its counterpart on the coordinator's machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import tomllib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
import tomlkit
from ray.exceptions import RayError
from typing_extensions import override

from potluck.common.errors import PotluckError, RunError
from potluck.deploy.local.demo_files import DemoFiles
from potluck.deploy.local.forked_processes import ForkedProcesses
from potluck.deploy.local.local_federation import LocalFederation, start_program
from potluck.deploy.local.processes import LocalProcess
from potluck.experiments.cluster.cell_report import SentFile
from potluck.experiments.cluster.node_folder import NodeFolder, usual_folder
from potluck.experiments.cluster.sent_data import DataFile
from potluck.experiments.grid.local_cells import OneForkServer
from potluck.experiments.grid.running import CellLostError

# The loop -----------------------------------------------------------------------------------------

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines from any thread in one event loop, in a thread that ends with the process.

    A Ray actor with coroutines as methods has its own event loop, but that loop may be unable to
    start processes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="federation", daemon=True).start()

    def do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end. Return its result, or raise its exception."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


# The actors ---------------------------------------------------------------------------------------

LOG_BYTES = 1 << 16


def use_environment(environment: Mapping[str, str | None]) -> None:
    """Restore the environment variables that Ray changes for workers, such as OMP_NUM_THREADS."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def node_address() -> str:
    """Return the address at which other machines of the cluster reach this one."""
    untyped: Any = ray.util
    return str(untyped.get_node_ip_address())


def data_directory(folder: NodeFolder, place: Path, sent: Sequence[SentFile] | None) -> Path | None:
    """Make a data directory of the sent files and return its path; None if no files were sent."""
    if sent is None:
        return None
    pieces = {each.file.blake3: each.pieces for each in sent}

    def fetched(file: DataFile) -> Iterable[memoryview]:
        for piece in pieces[file.blake3]:
            yield memoryview(ray.get(piece))

    return folder.data_folder(place, [each.file for each in sent], fetched)


def last_of_logs(folder: Path) -> dict[str, str]:
    """Return the last bytes of each log in a folder, by file name."""
    found = {}
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            found[path.name] = file.read().decode(errors="replace")
    return found


class HostActor:
    """Runs hosts' processes, one after another. A Ray actor with threads, without coroutines."""

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        use_environment(environment)
        self._loop = LoopThread()
        self._node = NodeFolder(usual_folder())
        self._around = contextlib.ExitStack()
        self._forks = OneForkServer(usual_folder() / f"fork-server-{os.getpid()}.log")
        self._process: LocalProcess | None = None

    def begin(
        self, name: str, files: Mapping[str, bytes], sent: Sequence[SentFile] | None
    ) -> tuple[int, str]:
        """Start the host with these files. Return its process group, and an error message or ""."""
        self.end()
        try:
            place = self._around.enter_context(self._node.workplace())
            config = _written(place, name, files, data_directory(self._node, place / "data", sent))
            self._process = self._loop.do(_host_process(place, config, self._forks))
        except PotluckError as error:
            self.end()
            return 0, error.message
        return self._process.group, ""

    def ended(self) -> tuple[int, str]:
        """Wait until the process ends. Return its exit code and the text to report."""
        process = self._process
        if process is None:
            return 0, "the host was not started"
        code = self._loop.do(process.ended())
        return code, process.exit_reason().message

    def end(self) -> None:
        """End the host's process and remove its folder. May be called more than once."""
        process, self._process = self._process, None
        if process is not None:
            self._loop.do(process.stop())
        self._around.close()

    def leave(self) -> None:
        """End all processes."""
        self.end()
        self._loop.do(self._forks.close())


async def _host_process(place: Path, config: Path, server: OneForkServer) -> LocalProcess:
    arguments, log = ["--config", str(config)], place / f"{config.stem}.log"
    forks = await server.forks()
    return await start_program(config.stem, "potluck-client", arguments, log=log, forks=forks)


def _written(place: Path, name: str, files: Mapping[str, bytes], data: Path | None) -> Path:
    """Write a host's files. Its configuration gets this machine's data directory."""
    for path, content in files.items():
        target = place / path
        target.parent.mkdir(exist_ok=True)
        target.touch(mode=0o600)
        target.write_bytes(content)
    config = place / name
    values = tomlkit.parse(config.read_text())
    if data is not None:
        values["data_directory"] = str(data)
    config.write_text(tomlkit.dumps(values))
    return config


class RemoteHost(LocalProcess):
    """A host's process on another machine, controlled through the actor there."""

    def __init__(self, name: str, log: Path, group: int, actor: Any) -> None:
        super().__init__(name, log, group)
        self._actor = actor
        self._code: int | None = None
        self._reason: RunError | None = None

    @property
    @override
    def exit_code(self) -> int | None:
        return self._code

    @override
    async def ended(self) -> int:
        code = -1
        try:
            code, said = await self._actor.ended.remote()
            self._reason = RunError(said)
        except RayError as error:
            self._reason = lost(self.name, error)
        self._code = code
        return code

    @override
    async def stop(self) -> None:
        with contextlib.suppress(RayError):
            await self._actor.end.remote()

    @override
    def exit_reason(self) -> RunError:
        return self._reason or RunError(f"the host {self.name} did not end in time")


def lost(what: str, error: Exception) -> CellLostError:
    """Return the error to raise for an actor that is lost, perhaps with its machine."""
    return CellLostError(f"the machine of {what} has left the cluster ({type(error).__name__})")


class SpreadFederation(LocalFederation):
    """A federation with its coordinator on this machine, and its hosts as processes of actors."""

    def __init__(
        self,
        files: DemoFiles,
        forks: ForkedProcesses | None,
        actors: Sequence[Any],
        sent: Sequence[SentFile] | None,
    ) -> None:
        """actors: one per host, in host order."""
        super().__init__(files, forks)
        self._actors, self._sent = actors, sent

    @override
    async def start_host(self, number: int) -> LocalProcess:
        """Start a host on its machine, through its actor. Raises RunError, CellLostError."""
        path, actor = self.files.hosts[number], self._actors[number]
        try:
            group, problem = await actor.begin.remote(path.name, _contents(path), self._sent)
        except RayError as error:
            raise lost(path.stem, error) from None
        if problem:
            raise RunError(f"{path.stem}: {problem}")
        host = RemoteHost(path.stem, self.files.log(path.stem), group, actor)
        self._processes.append(host)
        self.hosts[number] = host
        return host

    @override
    async def start(self) -> None:
        """Start all processes at once and wait until the coordinator accepts connections."""
        await self.start_coordinator()
        await asyncio.gather(*(self.start_host(each) for each in range(len(self.files.hosts))))
        await self.until_ready()


def _contents(config: Path) -> dict[str, bytes]:
    """Return the content of a host's configuration and of the files it names, by relative path."""
    tls: Mapping[str, str] = tomllib.loads(config.read_text())["tls"]
    return {path: (config.parent / path).read_bytes() for path in (config.name, *tls.values())}
