"""The processors and the memory that this process may use, within the limits of its control
groups."""

from __future__ import annotations

import os
from pathlib import Path

from potluck.common.process.control_groups import control_group_limits


def available_processors() -> int:
    """Return the number of processors that this process may use, at least 1.

    These are the processors on which it may run, or fewer if its control group limits processor
    time further.
    """
    limit = control_group_limits().processors
    here = _allowed()
    return here if limit is None else max(1, min(here, int(limit)))


def available_memory() -> int:
    """Return the number of bytes of free memory; if that is unknown, the machine's total memory."""
    limit = control_group_limits().memory
    free = _free()
    return free if limit is None else min(free, limit)


def _allowed() -> int:
    count = getattr(os, "process_cpu_count", None)  # from Python 3.13; uses PYTHON_CPU_COUNT, too
    if count is not None:
        return count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
        [line] = [line for line in text.splitlines() if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
