"""A second record of committed rounds, which shows whether the database has lost some.

A flipped bit in SQLite's write-ahead log, or an older backup, removes the last commits without an
error. So a line is written to a separate file after each commit. If a round is in this file but not
in the database, the database has lost it. After a crash, the last line may be missing. Blocking;
call it from any thread, but from only one at a time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from potluck.common.disk import sync_data
from potluck.common.errors import StorageError

_NOTHING = "-"
_SPARE_LINES = 1000

REBUILD = "restore them with `potluck-server rebuild`"
"""The remedy if the lost rounds have records."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """The last committed round of a run, as one line of the journal. Round 0, without files, if no
    round is committed."""

    run_id: str
    round: int
    model_blake3: str = ""
    state_blake3: str = ""

    @property
    def files(self) -> set[str]:
        """The files that the round references."""
        return {each for each in (self.model_blake3, self.state_blake3) if each}


class Journal:
    """A file with one line per commit. The last line about a run is the valid one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def read(self) -> list[Noted]:
        """Return all entries, oldest first. Incomplete or damaged lines are skipped.

        Raises StorageError.
        """
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error
        return [noted for noted in map(_decoded, lines) if noted is not None]

    def add(self, noted: Iterable[Noted]) -> None:
        """Append entries; return when they are on disk. Raises StorageError."""
        lines = b"".join(_encoded(each) for each in noted)
        if not lines:
            return
        try:
            if self._descriptor is None:
                self._descriptor = self._opened()
            os.write(self._descriptor, lines)
            sync_data(self._descriptor)
        except OSError as error:
            raise self._unusable(error) from error

    def shorten(self, noted: Iterable[Noted], lines: int) -> None:
        """Rewrite the file with only these entries if it has many more lines. lines: current number
        of lines. Raises StorageError."""
        kept = list(noted)
        if lines <= 2 * len(kept) + _SPARE_LINES:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            with temporary.open("wb") as file:
                file.writelines(_encoded(each) for each in kept)
                file.flush()
                os.fsync(file.fileno())
            self.close()
            temporary.replace(self._path)
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self._path, flags, 0o600)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # ends an incomplete line that a crash left
        return descriptor

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path}: {error.strerror}; check the disk of this file, or move the file to "
            "another folder to continue without its records",
            path=self._path,
        )


@dataclass(frozen=True, kw_only=True)
class LostRounds:
    """Committed rounds of a run that are missing in the database.

    committed: number of the last round in the database; None if the run itself is missing. lost:
    number of the last round that was committed. recorded: True if some of these rounds have
    records, from which they can be rebuilt.
    """

    run_id: str
    committed: int | None
    lost: int
    recorded: bool = False

    def explain(self, database: str) -> str:
        """Return one line that explains the loss and how to repair it."""
        rebuild = f"stop the coordinator and {REBUILD}, or " if self.recorded else ""
        if self.committed is None:
            return (
                f"run {self.run_id} with {self.lost} committed rounds is not in {database}: an "
                f"older backup was restored, or the file was damaged; {rebuild}restore a backup "
                "that has the run"
            )
        rounds = f"round {self.lost} was"
        if self.lost > self.committed + 1:
            rounds = f"rounds {self.committed + 1} to {self.lost} were"
        return (
            f"{rounds} committed but {database} ends with round {self.committed}: an older "
            f"backup was restored, or the file was damaged; {rebuild}restore a backup that has "
            f"more rounds, or continue after round {self.committed} with `potluck resume "
            f"{self.run_id}`"
        )


def losses(noted: Iterable[Noted], committed: Mapping[str, int]) -> dict[str, LostRounds]:
    """Return the rounds that a database has lost, by run. committed: number of each run's last
    round in the database."""
    last = {each.run_id: each.round for each in noted}
    return {
        run_id: LostRounds(run_id=run_id, committed=committed.get(run_id), lost=number)
        for run_id, number in last.items()
        if number > committed.get(run_id, 0) or (number and run_id not in committed)
    }


def _encoded(noted: Noted) -> bytes:
    files = (noted.model_blake3 or _NOTHING, noted.state_blake3 or _NOTHING)
    text = " ".join([noted.run_id, str(noted.round), *files])
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _decoded(line: bytes) -> Noted | None:
    checksum, _, text = line.partition(b" ")
    if f"{zlib.crc32(text):08x}".encode() != checksum:
        return None
    run_id, number, model, state = text.decode().split(" ")
    return Noted(
        run_id=run_id,
        round=int(number),
        model_blake3="" if model == _NOTHING else model,
        state_blake3="" if state == _NOTHING else state,
    )
