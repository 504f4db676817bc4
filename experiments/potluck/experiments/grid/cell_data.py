"""Digests of the data that the cells of a grid read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from potluck.common.learning.task_loading import make_task
from potluck.common.run_file.runfile import parse_run_file
from potluck.experiments.data_sets.prepare import DATA_SETS, data_sets_of, stored_sha256
from potluck.experiments.grid.grid_cells import Cell


def data_digests(cells: Iterable[Cell], folder: Path | None) -> dict[str, str]:
    """Return the SHA-256 of each data set and each trace that cells read, by name.

    folder: data directory. Files that are missing there are left out: on a cluster, other machines
    may have them. Raises ConfigurationError if a data set is invalid.
    """
    if folder is None:
        return {}
    found: dict[str, str] = {}
    for text in {cell.run_file for cell in cells}:
        run = parse_run_file(text, source="a cell")
        for name in data_sets_of(make_task(run.task.name, run.task.options)):
            if name not in found and (folder / DATA_SETS[name].form.file_name).is_file():
                found[name] = stored_sha256(name, folder)
        trace = run.virtual_clock.trace
        if trace is not None and trace not in found and (folder / trace).is_file():
            found[trace] = hashlib.sha256((folder / trace).read_bytes()).hexdigest()
    return dict(sorted(found.items()))
