"""A federation of real processes that a test kills, stops and starts again.

Its task, selector and strategy are those of `crash_plugins`: a test names the point of a round at
which a process must stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from support.shared_forks import shared_forks

from potluck.common.errors import UnreachableError
from potluck.deploy.local.demo_files import DemoFiles, DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation, kill
from potluck.deploy.local.processes import LocalProcess
from potluck.deploy.operator.operator_client import OperatorClient
from potluck.rpc.v1 import operator_pb2

PLUGINS = Path(__file__).parent / "crash_plugins"
SERVER_COMMAND = "potluck-server-command"
"""Value of `witnessed` for tests that record the changes made by a command of `potluck-server`."""
PATIENCE_SECONDS = 240.0
QUESTIONS = (
    "loss",
    "context",
    "gradient-norm",
    "sketch",
    "soft-label",
    "label-entropy",
    "availability",
)
"""Kinds of questions that Potluck's selectors ask."""
_LOOK_SECONDS = 0.03
_WATCH_SECONDS = 10.0
_NO_ROUND = 2**32 - 1
"""Number larger than any round: a watcher that starts after it receives no committed rounds."""

OVER = (
    operator_pb2.RUN_STATE_FINISHED,
    operator_pb2.RUN_STATE_STOPPED,
    operator_pb2.RUN_STATE_FAILED,
)


async def until(condition: Callable[[], bool], what: str = "condition") -> None:
    """Wait until `condition`, which other processes change, is true."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110  # other processes give no signal
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {PATIENCE_SECONDS:g} s") from None


async def until_listening(port: int) -> None:
    """Wait until a process listens on a port of this machine. A command that fails until then would
    use a second of processor time per try."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                writer.close()
                return


@dataclass(frozen=True)
class Points:
    """Points at which processes stop; see `crash_plugins/potluck_crash.py`."""

    folder: Path

    def kill(self, point: str) -> None:
        """Make the next process that reaches this point kill itself."""
        (self.folder / f"kill-{point}").touch()

    def kill_always(self, point: str) -> None:
        """Make every process that reaches this point kill itself."""
        (self.folder / f"die-{point}").touch()

    def fail(self, point: str) -> None:
        """Make the next process that reaches this point raise ValueError there."""
        (self.folder / f"raise-{point}").touch()

    def spare(self, point: str) -> bool:
        """Cancel a kill at a point; return False if a process was already killed there."""
        try:
            (self.folder / f"kill-{point}").unlink()
        except FileNotFoundError:
            return False
        return True

    def hold(self, *points: str) -> None:
        """Make processes wait when they reach one of these points."""
        for point in points:
            (self.folder / f"at-{point}").unlink(missing_ok=True)
            (self.folder / f"hold-{point}").touch()

    def release(self, *points: str) -> None:
        """Release processes held at these points; at all points if none is named."""
        for path in self.folder.glob("hold-*"):
            if not points or path.name.removeprefix("hold-") in points:
                path.unlink(missing_ok=True)

    def reached(self, point: str) -> bool:
        """Return True if a process has reached the point since the last `hold` of it."""
        return (self.folder / f"at-{point}").exists()

    def note_boundaries(self) -> None:
        """Make each later change to persistent state of the `witnessed` program a point, numbered
        from 1; see `crash_plugins/potluck_crash_boundaries.py`."""
        (self.folder / "boundaries").write_text("")

    @property
    def boundaries(self) -> list[str]:
        """Boundaries noted since `note_boundaries` was called."""
        return (self.folder / "boundaries").read_text().splitlines()

    def clear(self) -> None:
        """Delete all points and their records."""
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)  # a process that reaches a point deletes its file, too


@contextlib.contextmanager
def plugins_installed(points: Path, witnessed: str) -> Iterator[Points]:
    """Install the crash plug-ins in this process and its child processes. witnessed: program whose
    changes to persistent state are points."""
    points.mkdir(exist_ok=True)
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PLUGINS), *filter(None, [before.get("PYTHONPATH")])]
    )
    os.environ["POTLUCK_POINTS"] = str(points)
    os.environ["POTLUCK_BOUNDARIES"] = witnessed
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(PLUGINS))
    try:
        yield Points(points)
    finally:
        sys.path.remove(str(PLUGINS))
        os.environ.clear()
        os.environ.update(before)


@dataclass(kw_only=True)
class Federation:
    """The processes of a federation, and queries about their state."""

    files: DemoFiles
    processes: LocalFederation
    operator: OperatorClient
    points: Points
    options: DemoOptions
    _pids: list[int] = field(default_factory=list)

    @property
    def state(self) -> Path:
        """The coordinator's state directory."""
        settings = tomlkit.parse(self.files.coordinator.read_text())
        return self.files.folder / str(settings["state_directory"])

    @property
    def coordinator(self) -> LocalProcess:
        """The coordinator that was started last."""
        assert self.processes.coordinator is not None
        return self.processes.coordinator

    def spooled(self) -> list[Path]:
        """Return the files of complete updates in the spool."""
        return sorted(self.state.glob("spool/*/*/*.safetensors"))

    async def start_hosts(self) -> None:
        """Start all hosts."""
        for number in range(len(self.files.hosts)):
            await self.processes.start_host(number)

    async def until_attending(self, hosts: int | None = None) -> None:
        """Wait until this number of hosts is connected; all by default."""
        wanted = len(self.files.hosts) if hosts is None else hosts
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                # The channel may not have noticed yet that the coordinator was restarted.
                with contextlib.suppress(UnreachableError):
                    if len(await self.attending_hosts()) == wanted:
                        return
                await asyncio.sleep(_LOOK_SECONDS)

    async def attending_hosts(self) -> set[str]:
        """Return the names of the connected hosts."""
        clients = await self.operator.list_clients()
        return {client.host_id for client in clients if client.attending}

    async def restart_coordinator(self) -> None:
        """Restart the coordinator and wait until it accepts calls."""
        await self.processes.start_coordinator()
        await self.processes.until_ready()

    async def kill_coordinator(self) -> None:
        """End the coordinator by SIGKILL, as a crash would."""
        await kill(self.coordinator)

    async def server_command(self, *arguments: str, witnessed: bool = False) -> tuple[int, str]:
        """Run a command of `potluck-server` with the coordinator's configuration; return
        its exit code and output.

        witnessed: its changes are points, see `SERVER_COMMAND`. The exit code after signal N is
        then -N, otherwise 128 + N.
        """
        arguments = (*arguments, "--config", str(self.files.coordinator))
        forks = None if witnessed else shared_forks()
        if forks is not None:  # the fork server has already imported torch
            log = self.files.log("command")
            forked = await forks.fork("command", "potluck-server", arguments, log=log)
            return await forked.ended(), log.read_text(encoding="utf-8")
        command = [str(PLUGINS / SERVER_COMMAND)] if witnessed else ["-m", "potluck.server"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *arguments),
            cwd=self.files.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def kill_host(self, number: int) -> None:
        """End a host by SIGKILL, as a crash would."""
        await kill(self.processes.hosts[number])

    async def start_run(self, *assignments: str) -> str:
        """Start the run of the demo's files, with some values replaced."""
        from potluck.deploy.operator.run_overrides import override

        text = override(self.files.run_file, assignments, source="test")
        return await self.operator.start_run(text)

    async def status(self, run_id: str) -> operator_pb2.RunStatus:
        """Return a run's status."""
        runs = await self.operator.list_runs()
        return next(status for status in runs if status.run_id == run_id)

    async def ended(self, run_id: str) -> operator_pb2.RunStatus:
        """Wait until a run has ended, also across restarts of the coordinator."""
        status: operator_pb2.RunStatus = await self._until(
            run_id, lambda event: event.status if event.status.state in OVER else None
        )
        return status

    async def finished(self, run_id: str) -> str:
        """Wait until a run has finished; return the digest of its last model."""
        status = await self.ended(run_id)
        assert status.state == operator_pb2.RUN_STATE_FINISHED, status.reason
        assert status.committed_rounds == status.rounds
        return status.model_blake3

    async def history(
        self, run_id: str, *, after_round: int = 0
    ) -> list[operator_pb2.CommittedRound]:
        """Return the committed rounds of a run after a round, as a watcher receives them."""
        rounds: list[operator_pb2.CommittedRound] = []
        events = self.operator.watch_run(run_id, after_round=after_round)
        statuses = 0
        async for event in events:
            kind = event.WhichOneof("event")
            if kind == "committed":
                rounds.append(event.committed)
            statuses += kind == "status"
            if kind == "progress" or statuses > 1:
                break
        await events.aclose()
        return rounds

    async def until_committed(self, run_id: str, rounds: int) -> None:
        """Wait until this number of rounds is committed; raise AssertionError if the run fails."""

        def found(event: operator_pb2.WatchRunResponse) -> bool | None:
            committed = max(event.committed.round, event.status.committed_rounds) >= rounds
            failed = event.status.state == operator_pb2.RUN_STATE_FAILED
            assert committed or not failed, event.status.reason
            return committed or None

        await self._until(run_id, found)

    async def _until(
        self, run_id: str, found: Callable[[operator_pb2.WatchRunResponse], Any | None]
    ) -> Any:
        """Watch a run, also across restarts of the coordinator, until `found` returns a value for
        an event. Return the value. Watching costs the coordinator less than polling."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                # A stream has no deadline, so it could wait forever for a stopped coordinator.
                with contextlib.suppress(UnreachableError, TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        watched = self.operator.watch_run(run_id, after_round=_NO_ROUND)
                        async with contextlib.aclosing(watched) as events:
                            async for event in events:
                                if (value := found(event)) is not None:
                                    return value
                await asyncio.sleep(_LOOK_SECONDS)

    async def before_round_two(self, *assignments: str) -> str:
        """Start a run, and hold it in the selection of round 2; return its id."""
        self.points.hold("select")
        run_id = await self.start_run(*assignments)
        await until(lambda: self.points.reached("select"))
        self.points.hold("weigh")
        self.points.release("select")
        await until(lambda: self.points.reached("weigh"))
        self.points.hold("select")
        self.points.release("weigh")
        await until(lambda: self.points.reached("select"))
        assert (await self.status(run_id)).committed_rounds == 1
        return run_id

    async def cohort(self, run_id: str) -> list[operator_pb2.Member]:
        """Wait until a cohort is selected, and return it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            events = self.operator.watch_run(run_id)
            async for event in events:
                members = event.progress.members or event.committed.members
                if members:
                    await events.aclose()
                    return list(members)
        raise AssertionError("the run ended before it had chosen anybody")


@contextlib.asynccontextmanager
async def crash_federation(
    folder: Path,
    *,
    clients: int = 6,
    hosts: int = 3,
    count: int = 4,
    rounds: int = 3,
    assignments: Sequence[str] = (),
    coordinator: dict[str, Any] | None = None,
    start_hosts: bool = True,
    root: bool = False,
    disclosure: dict[str, Any] | None = None,
    witnessed: str = "potluck-server",
    host: dict[str, Any] | None = None,
) -> AsyncIterator[Federation]:
    """Run a federation. `coordinator`: settings of the coordinator's configuration file. `root`:
    True to create a federation root, which secure sums need. `disclosure`: settings of the hosts'
    [disclosure], in addition to the allowed questions. `witnessed`: see `Points.note_boundaries`.
    `host`: settings of the hosts' files."""
    options = DemoOptions(
        task="crash",
        selector="crash",
        strategy="crash",
        clients=clients,
        hosts=hosts,
        count=count,
        rounds=rounds,
        seed=7,
        device="cpu",
        assignments=["training.steps=3", "round.grace_seconds=20", *assignments],
        root=root,
        disclosure={
            "questions": [*QUESTIONS, "watched-loss", "psychic"],
            **(disclosure or {}),
        },
    )
    with plugins_installed(folder / "points", witnessed) as points, reserved_port() as port:
        files = write_demo_files(folder / "federation", options, port)
        set_values(files.coordinator, {"heartbeat_seconds": 0.2} | (coordinator or {}))
        for path in files.hosts:
            set_values(path, {"reconnect_maximum_seconds": 0.3} | (host or {}))
        async with (
            LocalFederation(files, shared_forks()) as processes,
            processes.operator() as operator,
        ):
            federation = Federation(
                files=files, processes=processes, operator=operator, points=points, options=options
            )
            try:
                await processes.start_coordinator()
                if start_hosts:
                    await federation.start_hosts()
                await processes.until_ready()
                yield federation
            finally:
                points.clear()


def set_values(path: Path, values: dict[str, Any]) -> None:
    """Change values of a TOML file."""
    document = tomlkit.parse(path.read_text())
    document.update(values)
    path.write_text(tomlkit.dumps(document))
