"""A look at a file's numbers while it is verified, as each piece is in the processor's cache then.

Nothing is believed of the file and nothing in it is followed: its bytes are taken for float32
words from its beginning on, and added up. A file whose words are all finite holds no NaN and no
infinity in any float32 tensor that begins at a multiple of four bytes; of another file nothing is
known, as a tensor of integers may look like NaN.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from potluck.common.tensors import block_is_finite

WORD_BYTES: Final = 4


class FiniteScreen:
    """Sees a file's bytes in order, in pieces of any size."""

    def __init__(self) -> None:
        self._clean = True

    def see(self, piece: bytes | memoryview) -> None:
        """The next piece. Only the last may end within a word, else nothing is known."""
        if not self._clean:
            return
        words, rest = divmod(len(piece), WORD_BYTES)
        found = np.frombuffer(piece, np.float32, count=words)
        # After a piece that ends within a word the words of the next are no longer the file's.
        self._clean = rest == 0 and block_is_finite(found)

    @property
    def clean(self) -> bool:
        """Whether every float32 word so far was finite."""
        return self._clean
