"""Memory of a federation's processes while they work; for memory benchmarks."""

from __future__ import annotations

import asyncio
import contextlib

from scale import resident

from potluck.deploy.local.local_federation import LocalFederation

_LOOK_SECONDS = 0.05


class PeakMemory:
    """Maximum private memory of each process, in bytes, while `watch` runs.

    peaks: maximum by process; a restarted process has its own entry. idle: memory at the first
    sample of each process.
    """

    def __init__(self, federation: LocalFederation) -> None:
        self._federation = federation
        self.peaks: dict[str, int] = {}
        self.idle: dict[str, int] = {}

    async def watch(self) -> None:
        """Sample repeatedly until cancelled."""
        while True:
            for number, process in enumerate(self._federation.processes):
                with contextlib.suppress(OSError, ValueError, KeyError):  # a process was killed
                    name, held = f"{process.name} ({number})", resident(process)["RssAnon"]
                    self.idle.setdefault(name, held)
                    self.peaks[name] = max(self.peaks.get(name, 0), held)
            await asyncio.sleep(_LOOK_SECONDS)

    def of(self, *, hosts: bool) -> int:
        """Return the maximum over all hosts' processes if `hosts`, else the coordinator's."""
        return max(held for name, held in self.peaks.items() if name.startswith("host") == hosts)
