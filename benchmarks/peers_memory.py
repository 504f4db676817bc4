"""The private memory of processes and their descendants, over time. Linux only: it reads /proc."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from potluck.common.errors import RunError

SAMPLE_SECONDS = 0.03
RESCAN_SECONDS = 0.5
"""Interval between searches for new processes; a search costs more than reading known processes."""


@dataclass
class Memory:
    """Private anonymous memory (RssAnon, bytes) of processes and their descendants, over time."""

    roots: Callable[[], Iterable[int]]
    samples: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Sample while the block runs."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _sample(self) -> None:
        scanned = 0.0
        pids: set[int] = set()
        while True:
            now = time.monotonic()
            if now - scanned > RESCAN_SECONDS:
                pids = _descendants(set(self.roots()))
                self.names.update({pid: _name(pid) for pid in pids})
                scanned = now
            self.samples.append((now, {pid: _anonymous(pid) for pid in pids}))
            await asyncio.sleep(SAMPLE_SECONDS)

    def at(self, moment: float) -> int:
        """Return the memory of all processes in the last sample before a moment."""
        sums = [sum(sizes.values()) for at, sizes in self.samples if at <= moment]
        if not sums:
            raise RunError("no process of the server was seen before the run was submitted")
        return sums[-1]

    def peak(self, start: float, end: float) -> tuple[int, dict[str, int]]:
        """Return the peak of the sum between two moments, and the peak of each process by name."""
        within = [sizes for at, sizes in self.samples if start <= at <= end]
        largest: dict[str, int] = {}
        for sizes in within:
            for pid, size in sizes.items():
                name = self.names[pid]
                largest[name] = max(largest.get(name, 0), size)
        return max(sum(sizes.values()) for sizes in within), largest


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; empty if it has ended."""
    return [part.decode(errors="replace") for part in read(pid, "cmdline").split(b"\0")]


def processes_of(name: str, inside: Iterable[int]) -> list[int]:
    """Return descendants of `inside` whose program, script or process name is `name`."""
    return [
        pid
        for pid in _descendants(set(inside))
        if name in (Path(part).name for part in command_line(pid)[:4])
        or name[:15].encode() == read(pid, "comm").strip()
    ]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


def _descendants(roots: set[int]) -> set[int]:
    """Return these processes and all their descendants."""
    parents: dict[int, int] = {}
    for pid in pids():
        fields = read(pid, "stat").rpartition(b")")[2].split()
        if fields:
            parents[pid] = int(fields[1])
    found = roots & parents.keys()
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def _anonymous(pid: int) -> int:
    for line in read(pid, "status").splitlines():
        if line.startswith(b"RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _name(pid: int) -> str:
    """Return the name of the module or script that a Python process runs."""
    parts = command_line(pid)
    if "-m" in parts[:-1]:
        return parts[parts.index("-m") + 1].rpartition(".")[2]
    names = [Path(part).name for part in parts if part and not part.startswith("-")]
    return next((name for name in names if not name.startswith("python")), "python")
