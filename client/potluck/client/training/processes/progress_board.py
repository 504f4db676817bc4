"""Memory that two processes share: the progress of trainings, and which of them are cancelled."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Final

import numpy as np

from potluck.common.errors import StorageError
from potluck.common.trainer import TrainingProgress

PLACES: Final = 1024
"""Maximum number of trainings at once in one process."""
_BYTES: Final = 9 * PLACES


class ProgressBoard:
    """One entry per running training: its progress in [0, 1], and a flag that cancels it."""

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: file descriptor of an existing board; None makes a new one.

        Raises StorageError.
        """
        if descriptor is None:
            self.descriptor = _shared_memory()
        else:
            self.descriptor = descriptor
        memory = mmap.mmap(self.descriptor, _BYTES)
        self._shares = np.frombuffer(memory, np.float64, PLACES)
        self._cancelled = np.frombuffer(memory, np.uint8, PLACES, offset=8 * PLACES)

    def release(self) -> None:
        """Close the descriptor once the other process has a copy; the memory stays usable."""
        os.close(self.descriptor)

    def clear(self) -> None:
        """Reset all entries: progress 0, not cancelled."""
        self._shares.fill(0.0)
        self._cancelled.fill(0)

    def follow(self, place: int, progress: TrainingProgress) -> None:
        """Report the progress of a training in the other process to `progress`, and pass a
        cancellation on to that process."""
        if progress.is_cancelled():
            self._cancelled[place] = 1
        progress.note(float(self._shares[place]))

    def at(self, place: int) -> TrainingProgress:
        """Return the progress of a training in this process, visible to the other process."""
        return TrainingProgress(
            lambda share: self._shares.__setitem__(place, share),
            lambda: bool(self._cancelled[place]),
        )


def _shared_memory() -> int:
    """Return the descriptor of new shared memory; without memfd, of an unnamed file."""
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("potluck-board")
            os.ftruncate(descriptor, _BYTES)
            return descriptor
        with tempfile.TemporaryFile(prefix="potluck-board-") as file:
            file.truncate(_BYTES)
            return os.dup(file.fileno())
    except OSError as error:
        raise StorageError(
            f"can't make {_BYTES} bytes of memory that a worker process shares: {error.strerror}; "
            "set TMPDIR to a folder this user may write to, or workers = 1"
        ) from error
