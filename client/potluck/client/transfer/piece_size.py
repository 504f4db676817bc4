"""The size of pieces of files on a link; the receiver confirms each piece.

Heartbeats and pings wait behind the bytes in transit, so pieces must be small on a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

_SECONDS = 3.0
"""Target duration of a piece, in seconds, at the last piece's rate; ping timeouts are longer."""

LEAST_PIECE_BYTES = 5 << 10
"""Minimum size of a piece, also used while the rate is unknown. Several hosts may share a line: at
7.5 kB/s, the first pieces and handshakes of seven hosts arrive within a ping's timeout."""

_GROWTH = 4
"""Maximum growth factor: buffers in the network can make a small piece look too fast."""


@dataclass
class PieceSize:
    """The piece size in one direction: the bytes that the link carries in a few seconds."""

    bytes: int = LEAST_PIECE_BYTES

    def confirmed(self, size: int, seconds: float) -> None:
        """Adapt the size to the rate at which a piece arrived."""
        carried = int(size / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes * _GROWTH))

    def broke(self, gained: int, seconds: float) -> None:
        """Halve the size after the link broke; reduce it further if the measured rate is lower."""
        carried = int(gained / max(seconds, 1e-3) * _SECONDS)
        self.bytes = max(LEAST_PIECE_BYTES, min(carried, self.bytes // 2))
