"""The digest that identifies a file: BLAKE3 of its bytes, 64 lower-case hexadecimal digits.

Why BLAKE3: each byte of a round is hashed three times, by its writer, on a host and on the
coordinator. With SHA-256, that took a third of a round's processor time (docs/contributing/adr).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from potluck.common.interruptible import interruption

# Files in pieces ----------------------------------------------------------------------------------
# Files are read, not mapped: if a mapped page can't be read, the kernel sends SIGBUS, which ends
# the process. A mapped page can't be read after a disk error, beyond the end of a file that was
# shortened, and at a hole in a file on a full tmpfs.


def file_pieces(descriptor: int, begin: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes [begin, end) of an open file in order; each piece is overwritten by the next.

    Raises OSError if the disk fails or the file ends before `end`.
    """
    buffer = bytearray(min(piece_bytes, max(0, end - begin)))
    whole = memoryview(buffer)
    while begin < end:
        length = os.preadv(descriptor, [whole[: end - begin]], begin)
        if not length:
            raise OSError(
                errno.EIO, f"the file has only {begin} bytes, but {end} bytes were expected"
            )
        yield whole[:length]
        begin += length


# The digest ---------------------------------------------------------------------------------------

_PIECE_BYTES = 1 << 20


def hasher() -> blake3:
    """Return a hash object to feed with `update`. It is single-threaded and releases the
    interpreter's lock."""
    return blake3()


def digest_of(content: bytes | memoryview) -> str:
    """Return the digest of some bytes."""
    return blake3(content).hexdigest()


def digest_of_file(path: Path) -> tuple[str, int]:
    """Return digest and length of a file. Raises OSError."""
    digest, size, check = blake3(), 0, interruption()
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            check()
            digest.update(memoryview(buffer)[:length])
            size += length
    return digest.hexdigest(), size
