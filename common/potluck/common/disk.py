"""Writes the content of files to disk."""

from __future__ import annotations

import os
from pathlib import Path


def sync_data(descriptor: int) -> None:
    """Wait until the content of an open file is on disk. Its timestamps may be written later.
    Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # macOS has no fdatasync
        os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file's content to disk, or a folder's list of file names, so that new names survive a
    power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
