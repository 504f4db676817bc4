"""Zeros in files as holes, which take neither space on the disk nor time to be written; and files
without any.

The difference of a model of which most is frozen is nearly all zeros, as is a model that begins so.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

_RESERVED_AT_ONCE: Final = 1 << 20
_LOOK_BYTES: Final = 64
"""Bytes of a piece that are looked at first: hardly any piece of trained weights begins so."""


def write_at(descriptor: int, piece: memoryview, place: int) -> None:
    """Write bytes at a place of a file that is open for reading too; zeros are left out where the
    file has no others. Raises OSError."""
    if _is_zero(piece) and _is_zero_there(descriptor, place, len(piece)):
        return
    _write_all(descriptor, piece, place)


def reserve(descriptor: int, size: int) -> None:
    """Give each of a file's first `size` bytes its place on the disk; it gets at least so long.

    What the file holds stays. descriptor: open for reading and writing. Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    for place in range(0, size, _RESERVED_AT_ONCE):  # macOS has no such call
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
        # What lies beyond the end of the file so far reads as zeros once it is longer.
        held = os.pread(descriptor, size, place)
        os.ftruncate(descriptor, end)
        return not any(held)
    return _is_zero(memoryview(os.pread(descriptor, size, place)))
