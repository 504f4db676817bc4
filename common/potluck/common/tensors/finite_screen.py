"""Checks a file's numbers while its digest is verified, when each piece is in the processor's
cache.

The check trusts nothing in the file. It reads everything after the header as float32 words and
compares these with the bounds. The header's length is in the first eight bytes. If all words are
numbers within bounds, every float32 tensor that begins at a multiple of four bytes is also within
bounds, if the file is a valid tensor file. Otherwise the check is inconclusive, because integers
read as float32 may look like NaN.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from potluck.common.tensors.tensor_files import block_is_within_bounds

WORD_BYTES: Final = 4
_LENGTH_BYTES: Final = 8


class FiniteScreen:
    """Checks a tensor file's bytes in order, in pieces of any size; the first piece has at least 8
    bytes."""

    def __init__(self) -> None:
        self._clean = True
        self._header_left: int | None = None

    def see(self, piece: bytes | memoryview) -> None:
        """Check the next piece. `clean` becomes False if a piece other than the last ends within a
        word."""
        if not self._clean:
            return
        if self._header_left is None:
            length = int.from_bytes(piece[:_LENGTH_BYTES], "little")
            self._header_left = _LENGTH_BYTES + length
            if len(piece) < _LENGTH_BYTES or self._header_left % WORD_BYTES:
                self._clean = False
                return
        skipped = min(self._header_left, len(piece))
        self._header_left -= skipped
        words, rest = divmod(len(piece) - skipped, WORD_BYTES)
        found = np.frombuffer(piece, np.float32, count=words, offset=skipped)
        # If this piece ends within a word, the next piece's words are misaligned: not clean.
        self._clean = rest == 0 and block_is_within_bounds(found)

    @property
    def clean(self) -> bool:
        """True if every float32 word up to now was a number within bounds."""
        return self._clean
