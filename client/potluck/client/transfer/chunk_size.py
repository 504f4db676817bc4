"""The size of file chunks on a link. If the link breaks, the received part of a chunk is lost."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES

_FEW = 8
_MANY = 64
"""If at least this number of chunks arrived before a link broke, the size is doubled."""


@dataclass
class ChunkSize:
    """The chunk size in one direction.

    If a link breaks before a chunk arrives, chunks must get smaller, or a file never arrives."""

    bytes: int = CHUNK_BYTES

    def broke(self, gained: int) -> None:
        """Adapt the size after the link broke; `gained`: bytes that had arrived.

        Halve the size if few chunks had arrived, so that less is lost next time. Double the size if
        many had arrived.
        """
        if gained < _FEW * self.bytes:
            self.bytes = max(LEAST_CHUNK_BYTES, self.bytes // 2)
        elif gained >= _MANY * self.bytes:
            self.passed()

    def passed(self) -> None:
        """Double the size, after the rest of a file has been transferred."""
        self.bytes = min(CHUNK_BYTES, self.bytes * 2)
