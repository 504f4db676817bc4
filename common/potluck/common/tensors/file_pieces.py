"""Reads files in pieces, so that a disk failure raises OSError.

Files are not mapped for this: if a mapped page can't be read, the kernel sends SIGBUS, which ends
the process. A mapped page can't be read after a disk error, beyond the end of a file that was
shortened, and at a hole in a file on a full tmpfs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def file_pieces(descriptor: int, begin: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes [begin, end) of an open file in order; each piece is overwritten by the next.

    Raises OSError if the disk fails or the file ends before `end`.
    """
    buffer = bytearray(min(piece_bytes, max(0, end - begin)))
    whole = memoryview(buffer)
    while begin < end:
        length = os.preadv(descriptor, [whole[: end - begin]], begin)
        if not length:
            raise OSError(errno.EIO, f"the file ends at byte {begin}, before its byte {end}")
        yield whole[:length]
        begin += length
