"""The size of pieces of files on a link: how much is on its way before the other side confirms it.

Heartbeats and pings wait behind what is on its way. So on a thin link it must be little.
"""

from __future__ import annotations

from dataclasses import dataclass

_SECONDS = 3.0
"""Time that a piece takes at the rate of the last one; pings are waited for longer."""

LEAST_PIECE_BYTES = 5 << 10
"""Size of a piece while the rate is unknown, and the minimum. Several hosts may share a line: at
7.5 kB/s the first pieces and handshakes of seven hosts pass before a ping is given up."""

_GROWTH = 4
"""A buffer on the way may swallow a small piece at once, which says little about the next one."""


@dataclass
class PieceSize:
    """The size in one direction: what the link carries in a few seconds."""

    bytes: int = LEAST_PIECE_BYTES

    def confirmed(self, size: int, seconds: float) -> None:
        """Adapt to the rate of a piece that arrived."""
        carried = int(size / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes * _GROWTH))

    def broke(self, gained: int, seconds: float) -> None:
        """Shrink after a break: to the rate until then, and by half at least."""
        carried = int(gained / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes // 2))
