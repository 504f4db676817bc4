"""The progress of an experiment: bars on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as RichTask
from rich.text import Text

from potluck.deploy.view.readable import readable_count, readable_seconds
from potluck.experiments.grid.grid_cells import Cell
from potluck.experiments.grid.results import CellResult


class Board:
    """Shows an experiment's cells; a context manager, used from one thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Remaining(),
            console=console,
            disable=not console.is_terminal,
        )
        self._whole: TaskID | None = None
        self._before = 0
        self._total = 0
        self._finished = 0
        self._cells = 0
        self._started = time.monotonic()
        self._rounds: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, cells: Sequence[Cell], finished: Mapping[str, CellResult]) -> None:
        """Show all cells of the experiment; some are finished already."""
        distinct = {cell.digest: cell for cell in cells}
        self._cells, self._finished = len(distinct), len(finished)
        self._total = sum(cell.rounds for cell in distinct.values())
        self._before = sum(distinct[digest].rounds for digest in finished)
        self._started = time.monotonic()
        self._whole = self._bars.add_task(
            "all rounds", total=self._total, completed=self._before, start_at=self._before
        )
        if finished and not self._console.is_terminal:
            self._say(f"{len(finished)} of {readable_count(self._cells, 'cell')} finished before")

    @contextmanager
    def cell(self, cell: Cell) -> Iterator[Callable[[int], None]]:
        """Show a cell while it runs; yield a function that takes its number of committed rounds."""
        bar = self._bars.add_task(cell.title, total=cell.rounds, start_at=0)
        started = time.monotonic()

        def progress(rounds: int) -> None:
            self._rounds[cell.digest] = rounds
            self._bars.update(bar, completed=rounds)
            if self._whole is not None:
                self._bars.update(self._whole, completed=self._done)

        try:
            yield progress
            self._end(cell, time.monotonic() - started)
        finally:
            self._bars.remove_task(bar)

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._say(text)

    def _end(self, cell: Cell, seconds: float) -> None:
        self._finished += 1
        committed = self._rounds.get(cell.digest, 0)
        self._total -= cell.rounds - committed  # rounds saved by stopping early
        if self._whole is not None:
            self._bars.update(self._whole, total=self._total)
        text = f"{self._finished}/{self._cells}  {cell.title}  {readable_seconds(seconds)}"
        left = self.remaining()
        if not self._console.is_terminal and left is not None:
            text += f", {readable_seconds(left)} to go"
        self._say(text)

    @property
    def _done(self) -> int:
        return self._before + sum(self._rounds.values())

    def remaining(self) -> float | None:
        """Return the remaining seconds, estimated from the pace so far; None if unknown."""
        done = self._done - self._before
        if done <= 0:
            return None
        pace = (time.monotonic() - self._started) / done
        return pace * (self._total - self._done)

    def _say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)


class _Remaining(ProgressColumn):
    """Estimates the remaining time from this command's pace; cells finished earlier don't count."""

    max_refresh = 0.5

    def render(self, task: RichTask) -> Text:
        begun = int(task.fields.get("start_at", 0))
        done = task.completed - begun
        if done <= 0 or not task.total or task.elapsed is None or task.finished:
            return Text("")
        left = task.elapsed / done * (task.total - task.completed)
        return Text(f"{readable_seconds(left)} to go", style="cyan")
