"""A hold on model files: while a backup copies them, none is deleted.

It is a lock on a file beside their folder, so it ends with the process that has it, in whatever
way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def hold_of(folder: Path) -> Path:
    """The file by which a folder of model files is held."""
    return folder.with_name(f"{folder.name}.hold")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep all files of a folder; waits for other backups. Raises OSError."""
    with _opened(folder) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def free_to_delete(folder: Path) -> Iterator[bool]:
    """Yield whether files may be deleted while the block runs. Raises OSError."""
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
