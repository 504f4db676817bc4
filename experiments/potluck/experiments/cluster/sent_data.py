"""The files of a data directory that cells read, identified by their digests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from potluck.common.errors import StorageError, disk_error
from potluck.common.tensors.digest import digest_of_file
from potluck.experiments.grid.grid_cells import Cell

_WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of a data directory. path: relative path, with slashes. size: in bytes."""

    path: str
    blake3: str
    size: int


class DataFiles:
    """The files of a data directory; the digest of each is computed once."""

    def __init__(self, data: Path | None) -> None:
        self._data = data
        self._known: dict[Path, DataFile] = {}

    def of(self, cell: Cell) -> list[DataFile]:
        """Return the existing files that a cell's task and models read.

        If the task does not declare its files, return all files of the directory. Raises
        StorageError if a file can't be read.
        """
        if self._data is None:
            return []
        found = {path: None for name in _names(cell) for path in self._below(self._data, name)}
        return [self._file(self._data, path) for path in sorted(found)]

    def location(self, file: DataFile) -> Path:
        """Return a file's path on this machine. Raises StorageError if no data directory is set."""
        if self._data is None:
            raise StorageError(f"can't find {file.path}: no data directory is set", path=file.path)
        return self._data / file.path

    def _below(self, data: Path, name: str) -> Iterator[Path]:
        path = data / name
        if not path.resolve().is_relative_to(data.resolve()):
            return  # the code that opens the file reports the problem
        if path.is_file() and path.suffix == ".json":  # an index is in the folder of its shards
            yield from path.parent.glob(f"*{_WEIGHTS}")
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (each for each in path.rglob("*") if each.is_file())

    def _file(self, data: Path, path: Path) -> DataFile:
        if path not in self._known:
            try:
                digest, size = digest_of_file(path)
            except OSError as error:
                raise disk_error(error, data) from error
            self._known[path] = DataFile(
                path=path.relative_to(data).as_posix(), blake3=digest, size=size
            )
        return self._known[path]


def _names(cell: Cell) -> list[str]:
    """Return the names of files that a cell reads in the data directory; "." means all files."""
    of_task = cell.task().data_files()
    if of_task is None:
        return ["."]
    base = None if cell.run.model is None else cell.run.model.base
    others = (cell.run.initial_model, base, cell.clock.trace)
    return [*of_task, *(name for name in others if name)]
