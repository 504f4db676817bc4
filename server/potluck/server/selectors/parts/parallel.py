"""Applies a function to long columns, in blocks that fit the cache, in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

Block = Callable[[int, int], None]
"""A function that processes the positions [start, stop)."""
Pass = Callable[[Block], None]
"""A function that applies a `Block` to all positions."""

_THREADS = min(4, os.cpu_count() or 1)
_WORTH_A_THREAD = 1 << 15


@contextmanager
def passes(length: int, block: int = 4096) -> Iterator[Pass]:
    """Yield a function that runs a `Block` over [0, length) in steps of `block`.

    Blocks write to separate positions, so the result is the same with any number of threads.
    """
    threads = min(_THREADS, 1 + length // _WORTH_A_THREAD)

    def stretch(work: Block, start: int, stop: int) -> None:
        for first in range(start, stop, block):
            work(first, min(first + block, stop))

    if threads == 1:
        yield lambda work: stretch(work, 0, length)
        return
    edges = [length * thread // threads for thread in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:

        def run(work: Block) -> None:
            list(pool.map(lambda i: stretch(work, edges[i], edges[i + 1]), range(threads)))

        yield run
