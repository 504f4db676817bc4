"""The processors and the memory that this process may use, within the limits of its control
groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

# Control groups -----------------------------------------------------------------------------------
# A group may not use more than the groups that contain it, so the lowest limit on the path to the
# root applies. See cgroups(7), and `cpu.max`, `memory.max` in the kernel's control-group v2 pages.

_FOLDER: Final = "sys/fs/cgroup"
_NO_LIMIT: Final = 2**60
"""Larger values mean no limit: without one, control groups of version 1 show the largest multiple
of the page size."""


@dataclass(frozen=True, kw_only=True)
class GroupLimits:
    """Limits of a process.

    processors: number of processors whose time the process may use. memory: bytes that it may still
    allocate. Each is None if there is no limit.
    """

    processors: float | None = None
    memory: int | None = None


def control_group_limits(root: Path = Path("/")) -> GroupLimits:
    """Return the limits of this process, from both versions of control groups.

    Without control groups, both limits are None. root: root of the file system; tests pass another
    folder.
    """
    processors = [each for folder in _folders(root, "cpu") for each in _quota(folder)]
    memory = [each for folder in _folders(root, "memory") for each in _free_in_group(folder)]
    return GroupLimits(processors=min(processors, default=None), memory=min(memory, default=None))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process, from its own up to the root."""
    top = root / _FOLDER
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # an empty list stands for version 2, with or without version 1
            mounts = [top, top / "unified"]
        elif controller in controllers.split(","):
            mounts = [top / controllers, top / controller]
        else:
            continue
        # In a container, the path may be the one outside the container; the group is then mounted
        # at / .
        ways = PurePosixPath(path.removeprefix("/"))
        for mount in mounts:
            for way in (ways, *ways.parents):
                yield mount / way


def _quota(folder: Path) -> Iterator[float]:
    """Yield the number of processors that a group may use: its time quota per period, divided by
    the period."""
    words = _words(folder / "cpu.max")  # version 1 has two files, see below
    words = words or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    if len(words) == 2 and all(each.isdecimal() for each in words) and int(words[1]):
        yield int(words[0]) / int(words[1])


def _free_in_group(folder: Path) -> Iterator[int]:
    """Yield the number of bytes left below a group's limit. The group's inactive file cache counts
    as free."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and most < _NO_LIMIT:
            spare = _entry(folder / "memory.stat", cached)
            yield max(0, most - max(0, (now or 0) - spare))


def _entry(path: Path, name: str) -> int:
    words = _words(path)
    found = [value for key, value in zip(words[::2], words[1::2], strict=False) if key == name]
    return int(found[0]) if found and found[0].isdecimal() else 0


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


# Capacity -----------------------------------------------------------------------------------------


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
