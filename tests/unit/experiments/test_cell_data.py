"""A folder's finished cells are used only with the data that they have read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from potluck.common.errors import ConfigurationError
from potluck.experiments.data_sets.prepare import DATA_SETS
from potluck.experiments.grid.cell_data import data_digests
from potluck.experiments.grid.definition import ExperimentFile
from potluck.experiments.grid.grid_cells import Cell, cells_of
from potluck.experiments.grid.results import ResultsFolder

TRACE = "client,start,end,speed\nclient-0,0,10,1\n"


def cells(task: str, **clock: object) -> list[Cell]:
    run = {
        "rounds": 1,
        "clients_per_round": 1,
        "task": {"name": task, "clients": 2},
        "virtual_clock": clock,
    }
    experiment = ExperimentFile.model_validate({"name": "small", "seeds": [0, 1], "run": run})
    return cells_of(experiment, hosts=1, source=Path("small.toml"))


def write_mnist(folder: Path, first: int) -> None:
    form = DATA_SETS["mnist"].form
    images = np.full((2, *(form.shape or ())), first, form.dtype)
    labels = np.array([0, 1])
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(folder / form.file_name, allow_pickle=False, **arrays)


def test_digests_follow_data_sets_and_traces(tmp_path: Path) -> None:
    work = cells("mnist", enabled=True, trace="nights.csv", deadline_seconds=9.0)
    assert data_digests(work, None) == data_digests(work, tmp_path) == {}
    write_mnist(tmp_path, 1)
    (tmp_path / "nights.csv").write_text(TRACE)
    found = data_digests(work, tmp_path)
    assert sorted(found) == ["mnist", "nights.csv"]
    assert data_digests(cells("digits"), tmp_path) == {}
    write_mnist(tmp_path, 2)
    (tmp_path / "nights.csv").write_text(TRACE + "client-1,0,10,1\n")
    again = data_digests(work, tmp_path)
    assert all(found[name] != again[name] for name in found)


def test_a_task_that_reads_another_task_s_file_has_its_digest(tmp_path: Path) -> None:
    """Coloured MNIST reads the file of MNIST."""
    run = {"rounds": 1, "clients_per_round": 1, "task": {"name": "cmnist"}}
    experiment = ExperimentFile.model_validate({"name": "small", "seeds": [0], "run": run})
    work = cells_of(experiment, hosts=1, source=Path("small.toml"))
    write_mnist(tmp_path, 1)
    assert data_digests(work, tmp_path) == data_digests(cells("mnist"), tmp_path)
    assert list(data_digests(work, tmp_path)) == ["mnist"]


def test_finished_cells_of_other_data_are_refused(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "done")
    with folder.opened():
        folder.check_data({"mnist": "aa"})
        folder.check_data({"mnist": "bb"})  # no cell has finished
        (folder.cells / "cell.json").write_text("{}")
        folder.check_data({"mnist": "bb", "nights.csv": "cc"})
        with pytest.raises(ConfigurationError, match=r"other data than your nights\.csv; name"):
            folder.check_data({"mnist": "bb", "nights.csv": "dd"})
        folder.check_data({"nights.csv": "cc"})
