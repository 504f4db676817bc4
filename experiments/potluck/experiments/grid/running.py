"""Runs the missing cells of an experiment, as many side by side as the machine carries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.common.errors import RunError
from potluck.experiments.grid.cell_run import remove_workplace, run_cell
from potluck.experiments.grid.experiment_progress import Board
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.label_mix import LabelMix, LabelMixes
from potluck.experiments.grid.results import CellResult, ResultsFolder

BYTES_PER_PROCESS = 500 * 2**20
"""Memory of a coordinator or host with torch and a small model, generously."""

BUSY_HOSTS = 0.6
"""Share of the time that a host of a cell computes: it waits while models are combined and
evaluated, and when it has fewer clients in a cohort than others."""


ATTEMPTS = 2
"""How often a cell is tried: on a busy machine a process may be too slow to start."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device, the data and the number of cells side by side."""

    device: str
    data: Path | None
    jobs: int


def jobs_for(hosts: int, cells: int, *, processors: int, memory: int) -> int:
    """Cells to run side by side: hosts that compute fill the processors, processes fit in memory.

    memory: bytes that may be used.
    """
    by_processors = round(processors / (hosts * BUSY_HOSTS))
    by_memory = memory // ((hosts + 1) * BYTES_PER_PROCESS)
    return max(1, min(by_processors, by_memory, cells))


def available_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of memory that are free for use; all there is where that is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
        [line] = [line for line in text.splitlines() if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class GridOutcome:
    """Results and failures of cells, by digest."""

    results: dict[str, CellResult]
    failures: dict[str, RunError]


async def run_missing(
    cells: Sequence[Cell], folder: ResultsFolder, place: Place, board: Board
) -> GridOutcome:
    """Results of all cells: those that were finished before, and those run now.

    A cell's result is on disk before the next one begins, so nothing finished is lost, whatever
    ends this. A cell whose federation fails is gone on with once; if it fails again, the others
    run all the same. Raises what would fail for every cell, such as missing data.
    """
    results = folder.finished(cells)
    for cell in cells:
        if cell.digest in results:  # killed after the result was kept
            remove_workplace(folder.workplace(cell))
    board.begin(cells, results)
    missing = list({cell.digest: cell for cell in cells if cell.digest not in results}.values())
    mixes = LabelMixes(place.data)
    queue = iter(missing)

    failures: dict[str, RunError] = {}

    async def work() -> None:
        for cell in queue:
            mix = await asyncio.to_thread(mixes.of, cell)
            try:
                result = await _run_stubbornly(cell, folder, place, board, mix)
            except RunError as error:
                failures[cell.digest] = error
                board.failed(cell, error.message)
                continue
            folder.keep(cell, result)
            results[cell.digest] = result
            remove_workplace(folder.workplace(cell))

    if missing:
        await asyncio.to_thread(mixes.of, missing[0])  # says at once that data are missing
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(place.jobs, len(missing))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return GridOutcome(results=results, failures=failures)


async def _run_stubbornly(
    cell: Cell, folder: ResultsFolder, place: Place, board: Board, mix: LabelMix
) -> CellResult:
    for left in reversed(range(ATTEMPTS)):
        with board.cell(cell) as progress:
            try:
                return await run_cell(
                    cell,
                    folder.workplace(cell),
                    device=place.device,
                    data=place.data,
                    label_mix=mix,
                    progress=progress,
                )
            except RunError:
                if not left:
                    raise
    raise AssertionError("unreachable")
