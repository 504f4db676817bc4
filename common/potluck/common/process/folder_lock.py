"""Locks a folder, so that only one process at a time can use it.

The lock is on a file `lock` in the folder, which is not deleted. The kernel releases the lock when
the process ends for any reason.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from potluck.common.errors import ConfigurationError, StorageError

NAME = "lock"


class FolderLock:
    """Holds the lock of a folder from construction to `close`."""

    def __init__(self, folder: Path, *, holder: str, remedy: str) -> None:
        """holder: kind of process that may hold the lock. remedy: advice if the lock is taken. Both
        are for errors.

        Raises ConfigurationError if another process holds the lock, StorageError if the disk fails.
        The folder must exist.
        """
        path = folder / NAME
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            process = os.read(self._file, 20).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise ConfigurationError(
                f"{folder} is in use by another {holder} (process {process}); {remedy}",
                path=folder,
                process=process,
            ) from None
        except OSError as error:
            self.close()
            raise _refused(path, error) from error

    def close(self) -> None:
        """Release the lock, so that another process can use the folder."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(f"can't lock {path}: {error.strerror}", path=path)
