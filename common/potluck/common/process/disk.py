"""Synchronisation of written data with the disk."""

from __future__ import annotations

import os


def sync_data(descriptor: int) -> None:
    """Write the content of an open file to disk, and return when it is there. Its times may follow
    later. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # macOS has no such call
        os.fsync(descriptor)
