"""Stores zeros as holes in files: holes need no disk space and no time to write. Also creates files
without holes.

The weight delta of a mostly frozen model is nearly all zeros, and so is a model whose initial
weights are zeros.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

_RESERVED_AT_ONCE: Final = 1 << 20
_LOOK_BYTES: Final = 64
"""Number of bytes that are compared with zero first. Trained weights rarely begin with zeros."""


def write_at(descriptor: int, piece: memoryview, place: int) -> None:
    """Write bytes at offset `place` of a file that is open for reading and writing.

    Zeros are not written if the file already reads as zeros there. Raises OSError.
    """
    if _is_zero(piece) and _is_zero_there(descriptor, place, len(piece)):
        return
    _write_all(descriptor, piece, place)


def reserve(descriptor: int, size: int) -> None:
    """Allocate disk space for the first `size` bytes of a file; extend a shorter file.

    The file's content stays. descriptor: open for reading and writing. Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for place in range(0, size, _RESERVED_AT_ONCE):  # macOS has no posix_fallocate
        length = min(_RESERVED_AT_ONCE, size - place)
        held = os.pread(descriptor, length, place)
        _write_all(descriptor, memoryview(held.ljust(length, b"\0")), place)


def _write_all(descriptor: int, piece: memoryview, place: int) -> None:
    while piece:
        written = os.pwrite(descriptor, piece, place)
        piece, place = piece[written:], place + written


def _is_zero(piece: memoryview) -> bool:
    if bytes(piece[:_LOOK_BYTES]).count(0) < min(len(piece), _LOOK_BYTES):
        return False
    return not np.frombuffer(piece, np.uint8).any()


def _is_zero_there(descriptor: int, place: int, size: int) -> bool:
    end = place + size
    if os.fstat(descriptor).st_size < end:
        # Zeros need no write here: when a file grows, the new bytes read as zeros.
        held = os.pread(descriptor, size, place)
        os.ftruncate(descriptor, end)
        return not any(held)
    return _is_zero(memoryview(os.pread(descriptor, size, place)))
