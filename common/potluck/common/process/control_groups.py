"""Limits that Linux control groups set for this process, for example in a container, a systemd unit
or a batch job.

A group may not use more than the groups that contain it, so the tightest limit on the path to the
root counts. See cgroups(7), and `cpu.max`, `memory.max` in the kernel's control-group v2 pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_FOLDER: Final = "sys/fs/cgroup"
_NO_LIMIT: Final = 2**60
"""Larger values mean no limit: if there is none, version 1 shows the largest multiple of a page."""


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
    memory = [each for folder in _folders(root, "memory") for each in _free(folder)]
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
        if not controllers:  # an empty list means version 2, alone or together with version 1
            mounts = [top, top / "unified"]
        elif controller in controllers.split(","):
            mounts = [top / controllers, top / controller]
        else:
            continue
        # In a container, the path may be that outside the container; the group is then mounted at /
        # .
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


def _free(folder: Path) -> Iterator[int]:
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
