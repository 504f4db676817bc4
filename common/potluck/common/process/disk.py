"""Synchronisation of written data with the disk."""

from __future__ import annotations

import os


def sync_data(descriptor: int) -> None:
    """Write the content of an open file to disk, and return when it is there. Its timestamps may be
    written later. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # macOS has no fdatasync
        os.fsync(descriptor)
