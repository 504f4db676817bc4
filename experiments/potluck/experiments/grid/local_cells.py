"""Runs cells as federations of processes on this machine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from typing_extensions import override

from potluck.deploy.local.demo_files import choices_of_user
from potluck.deploy.local.forked_processes import AVAILABLE, ForkedProcesses
from potluck.deploy.local.local_federation import LocalFederation
from potluck.experiments.grid.cell_run import CellPlace, Progress, run_cell
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.label_mix import LabelMix
from potluck.experiments.grid.results import CellResult, ResultsFolder
from potluck.experiments.grid.running import CellRunner

BYTES_PER_PROCESS = 500 * 2**20
"""Generous estimate of the memory of a coordinator or host with torch and a small model."""

BUSY_HOSTS = 0.6
"""Share of time in which a host of a cell computes.

The host waits while models are aggregated and evaluated, and if other hosts have more clients in a
cohort.
"""


def jobs_for(hosts: int, cells: int, *, processors: int, memory: int) -> int:
    """Return the number of cells to run in parallel.

    The number is such that busy hosts use all processors and all processes fit in memory. memory:
    bytes that may be used.
    """
    by_processors = round(processors / (hosts * BUSY_HOSTS))
    by_memory = memory // ((hosts + 1) * BYTES_PER_PROCESS)
    return max(1, min(by_processors, by_memory, cells))


class OneForkServer:
    """One fork server for all federations, since each new import of torch would take seconds.

    It is started when it is first needed, and restarted if it has ended.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._forks: ForkedProcesses | None = None
        self._starting = asyncio.Lock()

    async def forks(self) -> ForkedProcesses | None:
        """Return the fork server; None on a system without fork servers."""
        async with self._starting:
            if self._forks is not None and not self._forks.alive:
                await self.close()
            if self._forks is None and AVAILABLE:
                self._forks = await ForkedProcesses.start(self._log)
            return self._forks

    async def close(self) -> None:
        """End the fork server and all processes that it forked."""
        forks, self._forks = self._forks, None
        if forks is not None:
            await forks.close()
        self._log.unlink(missing_ok=True)


class LocalCells(CellRunner):
    """Runs cells on this machine; resumes a cell that was interrupted."""

    def __init__(self, folder: ResultsFolder, *, device: str, data: Path | None, jobs: int) -> None:
        """jobs: number of cells in parallel."""
        self._folder, self._device, self._data = folder, device, data
        self._jobs = jobs
        self._forks = OneForkServer(folder.running / "fork-server.log")

    @override
    def places(self) -> int:
        """Return the number of cells that may run at a time."""
        return self._jobs

    @override
    async def run(self, cell: Cell, label_mix: LabelMix, progress: Progress) -> CellResult:
        """Run a cell in its folder. Raises RunError."""
        place = CellPlace(
            workplace=self._folder.workplace(cell),
            device=self._device,
            data=self._data,
            federation=partial(LocalFederation, forks=await self._forks.forks()),
            choices=choices_of_user(),
        )
        return await run_cell(cell, place, label_mix=label_mix, progress=progress)

    @override
    async def keep_for(self, cells: int) -> None:
        """Do nothing: only the fork server is kept between cells, and it may be needed again."""

    @override
    async def close(self) -> None:
        """End the remaining processes."""
        await self._forks.close()
