"""What is written, on the disk for certain."""

from __future__ import annotations

import os


def sync_data(descriptor: int) -> None:
    """Return when what a file holds is on disk; its times may come later. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:  # macOS has no such call
        os.fsync(descriptor)
