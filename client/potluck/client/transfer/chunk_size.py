"""The size of chunks of files on a link. When it breaks, what came of a chunk is lost."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES

_FEW = 8
_MANY = 64
"""Chunks that arrived before a link broke."""


@dataclass
class ChunkSize:
    """The size in one direction. A link that breaks before a chunk is through must get smaller
    ones, or a file never arrives."""

    bytes: int = CHUNK_BYTES

    def broke(self, gained: int) -> None:
        """The link broke when so many bytes had arrived: halve if few chunks have, so that little
        is lost, and double if many have."""
        if gained < _FEW * self.bytes:
            self.bytes = max(LEAST_CHUNK_BYTES, self.bytes // 2)
        elif gained >= _MANY * self.bytes:
            self.passed()

    def passed(self) -> None:
        """All that was left of a file went through."""
        self.bytes = min(CHUNK_BYTES, self.bytes * 2)
