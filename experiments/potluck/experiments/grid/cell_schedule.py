"""Which cell is begun next, and whether one that went wrong is tried again. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from potluck.experiments.grid.grid_cells import Cell

ATTEMPTS = 2
"""How often a cell is tried: on a busy machine a process may be too slow to start."""

LOSSES = 10
"""How often a cell's machine may be lost. More often it is not by chance: a cell that takes all
memory ends each machine that it comes to."""


class CellSchedule:
    """The cells of an experiment that are waiting and those under way.

    Cells are begun in their order; one that is to be tried again goes first, since what it needs
    is at hand. Cells with one digest are one cell.
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
        """How many cells have still to be begun."""
        return len(self._waiting)

    def next(self, places: int) -> Cell | None:
        """Begin a cell; None where none is left or `places` cells are under way."""
        if not self._waiting or len(self._under_way) >= places:
            return None
        cell = self._waiting.popleft()
        self._under_way.add(cell.digest)
        return cell

    def finished(self, cell: Cell) -> None:
        """A cell that is under way has its result."""
        self._under_way.remove(cell.digest)

    def failed(self, cell: Cell) -> bool:
        """A cell that is under way has failed; whether it is tried again."""
        return self._ended_badly(cell, self._failed, self._attempts)

    def lost(self, cell: Cell) -> bool:
        """The machine of a cell that is under way is gone; whether the cell is tried again."""
        return self._ended_badly(cell, self._lost, self._losses)

    def _ended_badly(self, cell: Cell, count: Counter[str], most: int) -> bool:
        self._under_way.remove(cell.digest)
        count[cell.digest] += 1
        again = count[cell.digest] < most
        if again:
            self._waiting.appendleft(cell)
        return again
