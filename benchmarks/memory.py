"""Memory of a federation's processes while it is at work; for benchmarks that bound it."""

from __future__ import annotations

import asyncio
import contextlib

from scale import resident

from potluck.deploy.local.local_federation import LocalFederation

_LOOK_SECONDS = 0.05


class PeakMemory:
    """The most private memory that each process had, in bytes, while this was looking.

    peaks: by process; a process that was started anew is another one. idle: what it had when it
    was first looked at.
    """

    def __init__(self, federation: LocalFederation) -> None:
        self._federation = federation
        self.peaks: dict[str, int] = {}
        self.idle: dict[str, int] = {}

    async def watch(self) -> None:
        """Look now and then until cancelled."""
        while True:
            for number, process in enumerate(self._federation.processes):
                with contextlib.suppress(OSError, ValueError, KeyError):  # one that was killed
                    name, held = f"{process.name} ({number})", resident(process)["RssAnon"]
                    self.idle.setdefault(name, held)
                    self.peaks[name] = max(self.peaks.get(name, 0), held)
            await asyncio.sleep(_LOOK_SECONDS)

    def of(self, *, hosts: bool) -> int:
        """The most of one side."""
        return max(held for name, held in self.peaks.items() if name.startswith("host") == hosts)
