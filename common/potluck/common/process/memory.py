"""Memory settings of processes that move large files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

KEPT_BYTES = 16 << 20
_MOST_FREED_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of one message for the next one.

    By default glibc maps new memory for every message of a transfer and returns it right after. So
    the kernel clears each page again, which takes up to a third of a transfer's system time. After
    this call glibc keeps up to `KEPT_BYTES` of freed memory, in two heaps instead of one per
    thread. Does nothing with another C library.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 2)


class _Mallinfo2(ctypes.Structure):
    """glibc's statistics of its heaps, in bytes (mallinfo2(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip  # in the manual page's order


def give_back_freed_memory() -> None:
    """Return freed memory to the system if there is more of it than a round probably needs.

    glibc does not return freed memory that lies between objects in use, as after many simultaneous
    transfers. Does nothing unless the C library is glibc of 2021 or later.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Mallinfo2
        if library.mallinfo2().fordblks > _MOST_FREED_BYTES:
            library.malloc_trim(0)


def spare_what_is_loaded() -> None:
    """Exclude all existing objects, mostly of modules, from garbage collection.

    Call it after a process has loaded everything that it needs permanently. Each transfer creates
    many small objects, so the collector would scan all other objects again and again. A process
    with torch has half a million objects, and scanning them took a tenth of a round's processor
    time.
    """
    gc.freeze()
