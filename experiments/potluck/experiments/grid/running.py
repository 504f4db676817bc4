"""Runs the missing cells of an experiment, here or on the machines of a cluster."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.common.errors import RunError
from potluck.experiments.grid.cell_run import Progress, remove_workplace
from potluck.experiments.grid.experiment_progress import Board
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.label_mix import LabelMix, LabelMixes, traits_of
from potluck.experiments.grid.results import CellResult, ResultsFolder

# The schedule -------------------------------------------------------------------------------------
# The schedule is pure: it starts no process and reads no clock.

ATTEMPTS = 2
"""Maximum attempts at a cell: on a busy machine, a process may be too slow to start."""

LOSSES = 10
"""Number of times that a cell may lose its machine.

More losses are hardly chance: the cell may use all memory and so end every machine that runs it.
"""


class CellSchedule:
    """The waiting and the running cells of an experiment.

    Cells start in order, except that a cell to retry comes first, since its resources are free.
    Cells with the same digest are one cell.
    """

    def __init__(
        self, cells: Sequence[Cell], *, attempts: int = ATTEMPTS, losses: int = LOSSES
    ) -> None:
        self._waiting = deque({cell.digest: cell for cell in cells}.values())
        self._under_way = set[str]()
        self._attempts, self._losses = attempts, losses
        self._failed, self._lost = Counter[str](), Counter[str]()

    @property
    def waiting(self) -> int:
        """Number of cells that have not started yet."""
        return len(self._waiting)

    def next(self, places: int) -> Cell | None:
        """Start a cell and return it; None if no cell waits or `places` cells are running."""
        if not self._waiting or len(self._under_way) >= places:
            return None
        cell = self._waiting.popleft()
        self._under_way.add(cell.digest)
        return cell

    def finished(self, cell: Cell) -> None:
        """Record that a running cell has its result."""
        self._under_way.remove(cell.digest)

    def failed(self, cell: Cell) -> bool:
        """Record that a running cell has failed. Return True if it will be retried."""
        return self._ended_badly(cell, self._failed, self._attempts)

    def lost(self, cell: Cell) -> bool:
        """Record that the machine of a running cell is lost.

        Return True if the cell will be retried.
        """
        return self._ended_badly(cell, self._lost, self._losses)

    def _ended_badly(self, cell: Cell, count: Counter[str], most: int) -> bool:
        self._under_way.remove(cell.digest)
        count[cell.digest] += 1
        again = count[cell.digest] < most
        if again:
            self._waiting.appendleft(cell)
        return again


# Running ------------------------------------------------------------------------------------------


class CellLostError(RunError):
    """The machine that ran a cell was lost, so the cell must start again."""

    reason = "CELL_LOST"


class CellRunner(ABC):
    """Interface for running cells. Its methods are called from one event loop."""

    @abstractmethod
    def places(self) -> int:
        """Return the number of cells that can run at a time now; at least 1."""

    @abstractmethod
    async def run(self, cell: Cell, label_mix: LabelMix, progress: Progress) -> CellResult:
        """Run a cell to its end. When cancelled, end all of the cell's processes.

        Raises RunError if the cell fails, CellLostError if its machine fails.
        """

    @abstractmethod
    async def keep_for(self, cells: int) -> None:
        """Release resources that `cells` running cells don't need.

        Called when no cell waits any more. A running cell may still have to start again.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all remaining processes."""


@dataclass(frozen=True, kw_only=True)
class GridOutcome:
    """Results and failures of cells, by digest."""

    results: dict[str, CellResult]
    failures: dict[str, RunError]


async def run_missing(
    cells: Sequence[Cell],
    folder: ResultsFolder,
    mixes: LabelMixes,
    runner: CellRunner,
    board: Board,
) -> GridOutcome:
    """Run the missing cells. Return the results of all cells, including those finished before.

    Each result is written to disk at once, so an interruption loses no finished cell. If a cell's
    federation fails, the cell is tried once more; if it fails again, the other cells still run.
    Raises errors that concern every cell, such as missing data.
    """
    results = folder.finished(cells)
    for cell in cells:
        if cell.digest in results:  # the command was killed after the result was stored
            remove_workplace(folder.workplace(cell))
    board.begin(cells, results)
    missing = [cell for cell in cells if cell.digest not in results]
    grid = _Grid(missing, folder, mixes, runner, board)
    try:
        if missing:
            await asyncio.to_thread(mixes.of, missing[0])  # raises at once if data are missing
            await grid.run()
    finally:
        await runner.close()
    return GridOutcome(results=results | grid.results, failures=grid.failures)


class _Grid:
    """Runs a grid's cells in parallel, as many at a time as the runner has places for."""

    def __init__(
        self,
        cells: Sequence[Cell],
        folder: ResultsFolder,
        mixes: LabelMixes,
        runner: CellRunner,
        board: Board,
    ) -> None:
        self.results: dict[str, CellResult] = {}
        self.failures: dict[str, RunError] = {}
        self._schedule = CellSchedule(cells)
        self._folder, self._mixes, self._runner, self._board = folder, mixes, runner, board
        self._under_way: dict[asyncio.Task[CellResult], Cell] = {}

    async def run(self) -> None:
        """Run all cells. Raises errors that concern more than a single cell."""
        try:
            while True:
                while cell := self._schedule.next(self._runner.places()):
                    self._under_way[asyncio.create_task(self._run_cell(cell))] = cell
                if not self._schedule.waiting:
                    await self._runner.keep_for(len(self._under_way))
                if not self._under_way:
                    return
                ended, _ = await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    self._end(self._under_way.pop(task), task)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _run_cell(self, cell: Cell) -> CellResult:
        mix = await asyncio.to_thread(self._mixes.of, cell)
        with self._board.cell(cell) as progress:
            result = await self._runner.run(cell, mix, progress)
        return result.model_copy(update={"traits": traits_of(cell, mix)})

    def _end(self, cell: Cell, task: asyncio.Task[CellResult]) -> None:
        try:
            result = task.result()
        except CellLostError as error:
            self._board.note(f"cell lost: {cell.title}: {error.message}")
            if not self._schedule.lost(cell):
                self._give_up(cell, error)
        except RunError as error:
            if not self._schedule.failed(cell):
                self._give_up(cell, error)
        else:
            self._folder.keep(cell, result)
            remove_workplace(self._folder.workplace(cell))
            self._schedule.finished(cell)
            self.results[cell.digest] = result

    def _give_up(self, cell: Cell, error: RunError) -> None:
        self.failures[cell.digest] = error
        why = error.message.removeprefix(f"{cell.title}: ")
        self._board.note(f"cell failed: {cell.title}: {why}")
