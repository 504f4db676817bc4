"""How the C library's allocator treats the megabyte-sized messages of a transfer."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

KEPT_BYTES = 16 << 20


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of a message for the next one.

    By default it maps every message of a transfer anew and gives it back right after, so that the
    kernel clears each page again: up to a third of a transfer's system time. Up to `KEPT_BYTES`
    are kept instead, in two heaps and not in one for each thread. Does nothing where the C
    library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 2)
