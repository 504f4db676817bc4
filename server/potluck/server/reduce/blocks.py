"""Processes the floating-point vector of a model block by block, in several threads.

Blocks are independent, so the result has the same bits, whichever thread processes which block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.interruptible import interruption
from potluck.common.process.capacity import available_processors
from potluck.common.tensors.flat import unflatten
from potluck.common.tensors.large_arrays import empty
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_drafts import TensorDraft

BLOCK_ELEMENTS: Final = 2**18
"""Number of elements processed at once, 28 bytes each.

Such a block does not fit a core's cache, so a single thread would be faster with smaller blocks.
But each step on a block ends with a wait for the interpreter's lock: with small blocks, four
threads would mostly wait.
"""

_MAXIMUM_THREADS: Final = 4


def for_each_block(
    size: int,
    block: int,
    combiner: Callable[[], Callable[[int, int], None]],
    threads: int | None,
) -> None:
    """Split [0, size) into blocks, and process each block once, in several threads.

    Each thread calls `combiner()` once, and then the returned function with (begin, end) of each of
    its blocks.
    """
    # `next` of a range's iterator is atomic: no block is processed twice.
    begins = iter(range(0, size, block))
    check = interruption()

    def work() -> None:
        one_block = combiner()
        for begin in begins:
            check()
            one_block(begin, min(begin + block, size))

    if threads is None:
        threads = min(available_processors(), _MAXIMUM_THREADS)
    threads = max(1, min(threads, -(-size // block)))
    with ThreadPoolExecutor(threads, thread_name_prefix="reduce") as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


class Result:
    """A model that is computed block by block, in a draft file if one is given, else in memory."""

    def __init__(self, layout: Layout, draft: TensorDraft | None) -> None:
        self._layout = layout
        self._draft = draft
        self._vector = empty((0 if draft else layout.parameters,), np.float32)

    def scratch(self, elements: int) -> NDArray[np.float32]:
        """Return memory for one thread's blocks of at most `elements` elements."""
        return np.empty(elements if self._draft else 0, np.float32)

    def block(self, begin: int, end: int, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the array in which to compute elements [begin, end) of the floating-point
        vector."""
        return self._vector[begin:end] if self._draft is None else scratch[: end - begin]

    def put(self, begin: int, block: NDArray[np.float32]) -> None:
        """Store a block that has been computed."""
        if self._draft is not None:
            self._draft.put_flat(begin, block)

    def arrays(self, carried: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Return all tensors, after all blocks are computed. carried: the tensors that are not
        floating-point, which are copied."""
        if self._draft is None:
            copies = {name: array.copy() for name, array in carried.items()}
            return unflatten(self._vector, copies, self._layout)
        for name, array in carried.items():
            self._draft.put(name, 0, array)
        return self._draft.arrays
