"""Schedules cells: the next cell to start, and retries of failed cells. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from potluck.experiments.grid.grid_cells import Cell

ATTEMPTS = 2
"""Maximum attempts at a cell: on a busy machine, a process may be too slow to start."""

LOSSES = 10
"""Number of times that a cell may lose its machine.

More losses are not chance: a cell that uses all memory ends every machine that runs it.
"""


class CellSchedule:
    """The waiting and the running cells of an experiment.

    Cells start in their order, but a retry comes first, since its resources are free. Cells with
    the same digest are one cell.
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
