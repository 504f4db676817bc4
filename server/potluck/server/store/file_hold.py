"""A lock on model files, so that no file is deleted while a backup copies them.

The lock is on a file next to the models' folder. It ends with the process that holds it, even if
that process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def hold_of(folder: Path) -> Path:
    """Return the file whose lock protects a folder of model files."""
    return folder.with_name(f"{folder.name}.hold")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Prevent deletions in a folder while the block runs. Wait until other backups are finished.
    Raises OSError."""
    with _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def free_to_delete(folder: Path) -> Iterator[bool]:
    """Yield True if files may be deleted while the block runs, False if a backup holds the folder.
    Raises OSError."""
    with _opened(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(hold_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
