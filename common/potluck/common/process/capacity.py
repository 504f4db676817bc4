"""Processors and memory of this machine that may be used."""

from __future__ import annotations

import os
from pathlib import Path


def available_processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of memory that are free for use; all there is where that is not known."""
    try:
        text = Path("/proc/meminfo").read_text()
        [line] = [line for line in text.splitlines() if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
