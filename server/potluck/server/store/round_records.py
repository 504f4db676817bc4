"""Files with the rows of each committed round, from which a lost database can be rebuilt.

The files RUN/ROUND are next to the database. They are compressed JSON; the checksum of the
compression detects damage. Blocking; call it from any thread, but from only one at a time.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from potluck.common.errors import StorageError
from potluck.common.process.disk import sync_data
from potluck.server.store.round_copies import Tables


class RoundRecords:
    """The records of all runs in one folder, which is created with the first record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, run_id: str, number: int, tables: Tables) -> None:
        """Write the record of a round; return when it is on disk. Raises StorageError."""
        path = self._path(run_id, number)
        temporary = path.with_name(f".{number}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(zlib.compress(json.dumps(tables).encode(), level=1))
                file.flush()
                sync_data(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)  # deleting it frees space on a full disk

    def read(self, run_id: str, number: int) -> Tables:
        """Return the rows of a round. Raises StorageError if its record is missing or damaged."""
        path = self._path(run_id, number)
        try:
            tables: Tables = json.loads(zlib.decompress(path.read_bytes()))
        except OSError as error:
            raise _unusable(path, error) from error
        except (zlib.error, ValueError) as error:
            raise StorageError(f"{path} is damaged; restore it from a backup", path=path) from error
        return tables

    def has(self, run_id: str, number: int) -> bool:
        """Return True if a round has a record."""
        return self._path(run_id, number).is_file()

    def runs(self) -> list[str]:
        """Return the runs that have records, sorted. Raises StorageError."""
        return sorted(_names(self._folder))

    def rounds(self, run_id: str) -> list[int]:
        """Return the rounds of a run that have records, in order. Raises StorageError."""
        return sorted(int(name) for name in _names(self._folder / run_id) if name.isdecimal())

    def drop_after(self, run_id: str, number: int) -> None:
        """Delete the records of a run's rounds after `number`, because these rounds will be
        repeated.

        Raises StorageError.
        """
        for each in self.rounds(run_id):
            if each > number:
                self._path(run_id, each).unlink(missing_ok=True)

    def _path(self, run_id: str, number: int) -> Path:
        return self._folder / run_id / str(number)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: {error.strerror}; see its disk", path=path)
