"""Kills a process at every change to persistent state, one run per change, and checks the result.

An undisturbed run records the changes. For each change, the process is killed at that point of an
equal run, and restarted. The run must end as the undisturbed one did.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from support.evidence import Evidence, check_files, evidence, left_over
from support.federation import Federation, until
from support.relays import Relay

from potluck.common.errors import UnreachableError
from potluck.deploy.local.processes import LocalProcess

_TRIES = 5
"""Number of tries for a change that occurs only sometimes: two updates may be recorded at once."""
_FAILURES_ENOUGH = 3
"""Number of failures after which to stop: each failure may wait until a timeout."""


@dataclass(kw_only=True)
class Kills:
    """Kills that one kind of run must survive. assignments: changes of its run file. of_host: True
    to kill the first host instead of the coordinator. relay: killed instead, if set. unequal: see
    `evidence`."""

    federation: Federation
    assignments: Sequence[str]
    of_host: bool = False
    relay: Relay | None = None
    unequal: Collection[str] = ()
    pretrained: bool = False
    at: Literal["every", "first", "last"] = "every"
    """Changes at which to kill: every one, or the first or the last of each kind."""
    aimed: list[str] = field(default_factory=list)
    """Points at which runs were killed."""
    missed: list[str] = field(default_factory=list)
    """Changes that did not occur again in other runs."""
    failures: dict[str, str] = field(default_factory=dict)
    """Failures, by the point at which the run was killed."""

    _connection: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def everywhere(self) -> None:
        """Kill at every boundary of an undisturbed run."""
        async with self._connection:
            await self._connect()
            await self.federation.until_attending()
            await self._kill_everywhere()

    async def _kill_everywhere(self) -> None:
        await self._one_run()  # warm-up: only the first run creates models and profiles
        undisturbed = await self._one_run()
        boundaries = self.federation.points.boundaries
        for point in _points(_chosen(boundaries, self.at)):
            try:
                await self._kill_at(point, undisturbed)
            except (AssertionError, TimeoutError) as error:
                self.failures[point] = str(error)
                if len(self.failures) == _FAILURES_ENOUGH:
                    return

    async def _one_run(self) -> list[Evidence]:
        self.federation.points.clear()
        self.federation.points.note_boundaries()
        run_id = await self.federation.start_run(*self.assignments)
        await self.federation.finished(run_id)
        return await self._evidence(run_id)

    async def _kill_at(self, point: str, undisturbed: list[Evidence]) -> None:
        federation = self.federation
        for _ in range(_TRIES):
            federation.points.clear()
            federation.points.note_boundaries()
            federation.points.kill(point)
            known = {row.run_id for row in await federation.operator.list_runs()}
            killed = await self._run_into(point)
            if killed:
                await self._restart()
            begun = {row.run_id for row in await federation.operator.list_runs()} - known
            for run_id in begun:
                await federation.finished(run_id)
                for found, wanted in zip(await self._evidence(run_id), undisturbed, strict=True):
                    found.check_like(wanted)
            if killed:
                self.aimed.append(point)
                return
        self.missed.append(point)

    @property
    def _victim(self) -> LocalProcess:
        processes = self.federation.processes
        if self.relay is not None:
            assert self.relay.process is not None
            return self.relay.process
        return processes.hosts[0] if self.of_host else self.federation.coordinator

    async def _restart(self) -> None:
        self._check_logs()
        if self.relay is not None:
            await self.relay.start()
        elif self.of_host:
            await self.federation.processes.start_host(0)
        else:
            await self.federation.restart_coordinator()
            await self._connect()

    async def _connect(self) -> None:
        """Connect again after a start of the coordinator. Close the old connection first: while it
        is open, it and any new one would wait before the next attempt."""
        await self._connection.aclose()
        operator = self.federation.processes.operator()
        self.federation.operator = await self._connection.enter_async_context(operator)

    async def _run_into(self, point: str) -> bool:
        """Start a run; return True once the process was killed at the point, False once the run is
        over."""
        victim = self._victim

        async def until_over() -> None:
            try:
                run_id = await self.federation.start_run(*self.assignments)
            except UnreachableError:
                await victim.ended()
            else:
                await self.federation.ended(run_id)
                await self._updates_dropped()

        killed = asyncio.create_task(victim.ended())
        over = asyncio.create_task(until_over())
        await asyncio.wait({over, killed}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        await asyncio.wait({over})
        if self.federation.points.spare(point):
            assert not killed.done(), victim.exit_reason().message
            killed.cancel()
            return False
        assert await killed == 137, victim.exit_reason().message
        return True

    async def _evidence(self, run_id: str) -> list[Evidence]:
        """Return the evidence of a run, and of its pre-training run if there is one."""
        federation, unequal = self.federation, self.unequal
        self._check_logs()
        history = await federation.history(run_id)
        found = [evidence(federation, run_id, unequal=unequal)]
        digests = [row["model_blake3"] for row in found[0].rounds]
        assert [row.model_blake3 for row in history] == digests, "what is shown is not what is kept"
        if self.pretrained:
            found.append(evidence(federation, f"pre-{run_id}", unequal=unequal))
        await self._updates_dropped()
        check_files(federation)
        await until(
            lambda: not left_over(federation), "files that are no longer needed are deleted"
        )
        return found

    async def _updates_dropped(self) -> None:
        folder = self.federation.files.folder
        await until(lambda: not [*folder.glob("host-*/updates/*")], "hosts drop their updates")
        if self.relay is not None:
            left = self.relay.state
            try:
                await until(lambda: not [*left.glob("updates/*")], "the relay drops its updates")
            except AssertionError as error:
                names = [path.name for path in left.glob("updates/*")]
                raise AssertionError(f"{error}, still there: {names}") from None
            assert not [*left.glob("fetched/*")], "a partly fetched file is left"

    def _check_logs(self) -> None:
        files = self.federation.files
        logs = [files.log("coordinator"), files.log("host-0")]
        for path in [*logs, *([self.relay.log] if self.relay is not None else [])]:
            log = path.read_text()
            assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


def _chosen(boundaries: Sequence[str], at: Literal["every", "first", "last"]) -> list[str]:
    """Return every change, or the first or the last one of each kind, in order. A change's name is
    its kind and a number."""
    if at == "every":
        return list(boundaries)
    of_kind = defaultdict[str, list[str]](list)
    for boundary in boundaries:
        of_kind[boundary.rpartition("-")[0]].append(boundary)
    chosen = {same[0 if at == "first" else -1] for same in of_kind.values()}
    return [boundary for boundary in boundaries if boundary in chosen]


def _points(boundaries: Sequence[str]) -> list[str]:
    """Return the kill points: after each change, and before each change of the database.

    A database's changes need both: messages may be sent between the change before and this one.
    Nothing is sent between two changes of files, so "after one" is the same as "before the next".
    """
    points: list[str] = []
    for boundary in boundaries:
        of_files = boundary.startswith(("rename-", "sync-", "delete-"))
        points += [f"after-{boundary}"] if of_files else [f"before-{boundary}", f"after-{boundary}"]
    return points


async def command_points(federation: Federation, command: str, folder: Path) -> list[str]:
    """Run a command undisturbed; return the points after its first change of each kind, and after
    its last change.

    command: `backup` or `restore`. The federation must be one whose `SERVER_COMMAND` is witnessed.
    """
    federation.points.note_boundaries()
    code, output = await federation.server_command(command, str(folder), witnessed=True)
    assert code == 0, output
    *others, last = federation.points.boundaries
    return [f"after-{each}" for each in [*(each for each in others if each[-2:] == "-1"), last]]


async def killed_command(federation: Federation, point: str, command: str, folder: Path) -> None:
    """Run a command that is killed at a point."""
    federation.points.note_boundaries()
    federation.points.kill(point)
    code, output = await federation.server_command(command, str(folder), witnessed=True)
    assert code == -signal.SIGKILL, output
    assert not federation.points.spare(point)


async def refuses_to_serve(federation: Federation, backup: Path) -> None:
    """Assert that no command starts until the restore is repeated, and that the error says so."""
    for command in ((), ("rebuild",), ("backup", str(backup.with_name("another")))):
        code, output = await federation.server_command(*command)
        assert code == 1
        assert f"repeat it with `potluck-server restore {backup}`" in output
        assert "listening" not in output
