"""The schedule of cells and their repetitions, and the loop that follows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from potluck.common.errors import ConfigurationError, RunError
from potluck.experiments.grid.cell_run import Progress
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.experiment_progress import Board
from potluck.experiments.grid.grid_cells import Cell, cells_of
from potluck.experiments.grid.label_mix import LabelMix, LabelMixes
from potluck.experiments.grid.results import CellResult, ResultsFolder, Timings
from potluck.experiments.grid.running import (
    ATTEMPTS,
    LOSSES,
    CellLostError,
    CellRunner,
    CellSchedule,
    GridOutcome,
    run_missing,
)


def cell(name: str) -> Cell:
    return Cell(
        labels={"seed": name},
        seed=0,
        run_file="",
        rounds=1,
        clients=1,
        hosts=1,
        disclosure={},
        digest=name,
    )


def begun(schedule: CellSchedule, places: int) -> list[str]:
    found = []
    while each := schedule.next(places):
        found.append(each.digest)
    return found


def test_cells_are_started_in_order_up_to_the_number_of_places() -> None:
    first, second, third = cells = [cell(name) for name in "abc"]
    schedule = CellSchedule([*cells, cell("a")])
    assert begun(schedule, 2) == ["a", "b"]
    schedule.finished(first)
    assert begun(schedule, 1) == []  # only one place is left, and it is taken
    schedule.finished(second)
    assert begun(schedule, 4) == ["c"]
    assert schedule.waiting == 0
    schedule.finished(third)
    assert begun(schedule, 4) == []


def test_failed_cell_is_repeated_first_and_losses_are_not_failures() -> None:
    only, other = cell("a"), cell("b")
    schedule = CellSchedule([only, other], attempts=2, losses=3)
    for again in (schedule.lost, schedule.failed, schedule.lost):
        assert begun(schedule, 1) == ["a"]
        assert again(only)
    assert begun(schedule, 1) == ["a"]
    assert not schedule.lost(only)
    assert begun(schedule, 1) == ["b"]
    assert schedule.failed(other)
    assert begun(schedule, 1) == ["b"]
    assert not schedule.failed(other)
    assert begun(schedule, 1) == []


@given(
    count=st.integers(1, 6),
    ends=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["finished", "failed", "lost"])), max_size=60
    ),
    places=st.lists(st.integers(1, 4), min_size=1, max_size=60),
)
def test_every_cell_ends_exactly_once(
    count: int, ends: list[tuple[int, str]], places: list[int]
) -> None:
    schedule = CellSchedule([cell(str(number)) for number in range(count)])
    under_way: list[Cell] = []
    ended = Counter[str]()
    tries = Counter[str]()
    for step in range(count * (ATTEMPTS + LOSSES)):
        room = places[step % len(places)]
        while each := schedule.next(room):
            under_way.append(each)
            tries[each.digest] += 1
            assert len(under_way) <= room
        if not under_way:
            break
        which, how = ends[step] if step < len(ends) else (0, "finished")
        chosen = under_way.pop(which % len(under_way))
        if not getattr(schedule, how)(chosen):
            ended[chosen.digest] += 1
    assert ended == Counter({str(number): 1 for number in range(count)})
    assert max(tries.values()) <= ATTEMPTS + LOSSES - 1


# The loop ----------------------------------------------------------------------------------------


class Scripted(CellRunner):
    """A runner without federations. The result of a cell is that of a function of cell and
    attempt."""

    def __init__(self, script: Callable[[Cell, int], RunError | None]) -> None:
        self._script = script
        self.calls: list[str] = []
        self.told: list[int] = []
        self.closed = False

    def places(self) -> int:
        return 2

    async def run(self, cell: Cell, label_mix: LabelMix, progress: Progress) -> CellResult:
        self.calls.append(cell.title)
        if error := self._script(cell, self.calls.count(cell.title)):
            raise error
        progress(cell.rounds)
        return CellResult(
            labels=dict(cell.labels),
            digest=cell.digest,
            run_file=cell.run_file,
            clients=cell.clients,
            hosts=cell.hosts,
            rounds=[],
            model_blake3="",
            timings=Timings(rounds=[], total=0.0),
        )

    async def keep_for(self, cells: int) -> None:
        self.told.append(cells)

    async def close(self) -> None:
        self.closed = True


class NoMixes(LabelMixes):
    def of(self, cell: Cell) -> LabelMix:
        return LabelMix(np.zeros((1, 1), dtype=np.int64))


@pytest.fixture
def cells() -> list[Cell]:
    plan = ExperimentFile.model_validate(
        {
            "name": "grid",
            "seeds": [0, 1, 2, 3],
            "run": {"rounds": 2, "clients_per_round": 2, "task": {"name": "digits", "clients": 6}},
        }
    )
    return cells_of(plan, hosts=1, source=Path("grid.toml"))


def run(cells: list[Cell], output: Path, runner: Scripted) -> tuple[GridOutcome, str]:
    folder, console = ResultsFolder(output), Console(record=True, width=200)
    with folder.opened(), Board(console) as board:
        outcome = asyncio.run(run_missing(cells, folder, NoMixes(None), runner, board))
    return outcome, console.export_text()


def test_lost_cell_is_repeated_until_it_finishes(tmp_path: Path, cells: list[Cell]) -> None:
    def script(cell: Cell, attempt: int) -> RunError | None:
        return CellLostError("node 3 is gone") if cell.seed == 1 and attempt < 5 else None

    runner = Scripted(script)
    outcome, shown = run(cells, tmp_path, runner)
    assert set(outcome.results) == {each.digest for each in cells}
    assert outcome.failures == {}
    assert Counter(runner.calls)["seed 1"] == 5
    assert shown.count("lost: seed 1: node 3 is gone") == 4
    assert runner.closed
    assert runner.told[-1] == 0

    again = Scripted(script)
    assert run(cells, tmp_path, again)[0].results == outcome.results
    assert again.calls == []


def test_cell_that_fails_twice_is_abandoned_and_the_others_continue(
    tmp_path: Path, cells: list[Cell]
) -> None:
    runner = Scripted(lambda cell, _: RunError("no luck") if cell.seed == 0 else None)
    outcome, shown = run(cells, tmp_path, runner)
    assert [outcome.failures[each.digest].message for each in cells[:1]] == ["no luck"]
    assert set(outcome.results) == {each.digest for each in cells[1:]}
    assert runner.calls.count("seed 0") == ATTEMPTS
    assert shown.count("failed: seed 0: no luck") == 1


def test_configuration_error_in_one_cell_ends_the_experiment(
    tmp_path: Path, cells: list[Cell]
) -> None:
    def script(cell: Cell, attempt: int) -> RunError | None:
        raise ConfigurationError("another version there")

    runner = Scripted(script)
    with pytest.raises(ConfigurationError, match="another version there"):
        run(cells, tmp_path, runner)
    assert runner.closed
