"""Writes the content of files to disk."""

from __future__ import annotations

import os


def sync_data(descriptor: int) -> None:
    """Wait until the content of an open file is on disk. Its timestamps may be written later.
    Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # macOS has no fdatasync
        os.fsync(descriptor)
