"""The actor on a machine of a cluster: it runs the cells that it receives, one after the other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from potluck.common.errors import ConfigurationError, PotluckError, RunError
from potluck.deploy.local.demo_files import LOOPBACK, DemoFiles
from potluck.deploy.local.forked_processes import ForkedProcesses
from potluck.deploy.local.local_federation import LocalFederation
from potluck.experiments.cluster.cell_report import (
    CellReport,
    CellWork,
    check_software,
    software,
)
from potluck.experiments.cluster.host_actor import (
    LoopThread,
    SpreadFederation,
    data_directory,
    last_of_logs,
    node_address,
    use_environment,
)
from potluck.experiments.cluster.node_folder import NodeFolder, usual_folder
from potluck.experiments.grid.cell_run import CellPlace, Progress, run_cell
from potluck.experiments.grid.label_mix import LabelMix
from potluck.experiments.grid.local_cells import OneForkServer
from potluck.experiments.grid.results import CellResult
from potluck.experiments.grid.running import CellLostError

ENDED = -1
"""Value that `CellActor.rounds` returns once the cell has ended."""


class CellActor:
    """A Ray actor with several threads: one runs a cell, others report its rounds and can end it.

    No method is a coroutine, since Ray would then call all methods in one event loop.
    """

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        use_environment(environment)
        self._loop = LoopThread()
        self._node = NodeFolder(usual_folder())
        self._cells = _Cells(self._progress)
        self._changed = threading.Condition()
        self._number = 0
        self._rounds = 0
        self._over = False

    def run(self, work: CellWork) -> str:
        """Run a cell from its start. Return a `CellReport` as JSON."""
        with self._changed:
            self._number, self._rounds, self._over = work.number, 0, False
        try:
            return self._reported(work).model_dump_json()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def rounds(self, number: int, known: int) -> int:
        """Wait until more than `known` rounds of the cell are committed.

        Return their number, or ENDED if the cell has ended.
        """
        with self._changed:
            while self._number < number or (
                self._number == number and not self._over and self._rounds <= known
            ):
                self._changed.wait()
            return ENDED if self._number > number or self._over else self._rounds

    def leave(self) -> None:
        """End the running cell, and all processes."""
        self._loop.do(self._cells.end())

    def _reported(self, work: CellWork) -> CellReport:
        machine = f"machine {node_address()}"
        try:
            check_software(work.software, software(), machine=machine)
        except ConfigurationError as error:
            return CellReport(outcome="refused", reason=error.message)
        try:
            with self._node.workplace() as folder:
                return self._run(work, folder, machine)
        except PotluckError as error:
            return CellReport(outcome="failed", reason=f"{machine}: {error.message}")
        except concurrent.futures.CancelledError:
            return CellReport(outcome="failed", reason="the run of the cell was stopped")

    def _run(self, work: CellWork, folder: Path, machine: str) -> CellReport:
        data = data_directory(self._node, folder / "data", work.data)
        workplace = folder / "federation"
        try:
            result = self._loop.do(self._cells.run(work, workplace, data))
        except CellLostError as error:
            return CellReport(outcome="lost", reason=error.message)
        except RunError as error:
            reason = f"{machine}: {error.message}"
            return CellReport(outcome="failed", reason=reason, logs=last_of_logs(workplace))
        return CellReport(outcome="finished", result=result)

    def _progress(self, rounds: int) -> None:
        with self._changed:
            self._rounds = rounds
            self._changed.notify_all()


class _Cells:
    """The federations of an actor's cells, forked from one process. Used on one event loop."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._forks: OneForkServer | None = None
        self._task: asyncio.Task[CellResult] | None = None

    async def run(self, work: CellWork, workplace: Path, data: Path | None) -> CellResult:
        """Run a cell in its folder. Raises RunError."""
        if self._forks is None:
            self._forks = OneForkServer(usual_folder() / f"fork-server-{os.getpid()}.log")
        place = CellPlace(
            workplace=workplace,
            device=work.device,
            data=data,
            federation=_federation(work, await self._forks.forks()),
            address=node_address() if work.host_actors else LOOPBACK,
        )
        mix = LabelMix(work.counts)
        running = run_cell(work.cell, place, label_mix=mix, progress=self._progress)
        self._task = asyncio.create_task(running)
        try:
            return await self._task
        finally:
            self._task = None

    async def end(self) -> None:
        """End the running cell, and all processes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._forks is not None:
            await self._forks.close()


def _federation(
    work: CellWork, forks: ForkedProcesses | None
) -> Callable[[DemoFiles], LocalFederation]:
    if work.host_actors:
        return partial(SpreadFederation, forks=forks, actors=work.host_actors, sent=work.data)
    return partial(LocalFederation, forks=forks)
