"""The folder with the data of a relay that must survive a restart.

lock                     locked while the process runs
files/BLAKE3             files that hosts fetch, by their digest
files.spare/N            a file that is no longer needed, to be overwritten
fetched/BLAKE3[.part]    files that are being fetched from the coordinator
updates/…                updates until the coordinator has them; see `held_updates`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from potluck.common.errors import RelayStorageError, StorageError, disk_error
from potluck.common.process.folder_lock import FolderLock


@contextlib.contextmanager
def relay_disk(path: Path) -> Iterator[None]:
    """Turn errors of this machine's disk in the block into RelayStorageError.

    A host would treat a StorageError as an error of its own disk, or of the coordinator's disk.
    """
    try:
        yield
    except OSError as error:
        raise _relay_error(disk_error(error, path)) from error
    except StorageError as error:
        if not isinstance(error.__cause__, OSError):  # the coordinator's disk failed: pass it on
            raise
        raise _relay_error(error) from error


def _relay_error(error: StorageError) -> RelayStorageError:
    return RelayStorageError(f"the relay's disk failed: {error.message}", **error.metadata)


class RelayState:
    """An open state directory, held by this process alone."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing, and lock it.

        Raises ConfigurationError if another process holds it, StorageError if the folder can't be
        made or locked.
        """
        self.path = path
        self.files = path / "files"
        self.fetched = path / "fetched"
        self.updates = path / "updates"
        try:
            for folder in (path, self.files, self.fetched, self.updates):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise StorageError(
                f"can't use the state directory {path}: {error.strerror}; set state_directory to "
                "a folder that this user may write to",
                path=path,
            ) from error
        self._lock = FolderLock(
            path,
            holder="relay",
            remedy="stop the other relay, or give each relay its own state_directory",
        )

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.close()
