"""Norms of updates and distances between models, computed in float64 block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.tensor_files import Tensors
from potluck.server.reduce.blocks import BLOCK_ELEMENTS, for_each_block
from potluck.server.reduce.update_files import Update, decoders_of


def update_norms(
    updates: Sequence[Update], model: Tensors, *, threads: int | None = None
) -> NDArray[np.float64]:
    """Return the L2 norm of update − model for each update, summed in float64.

    The norm is over all floating-point tensors. Returns one value for each update, in client order.
    Raises LayoutError if an update does not fit the model.
    """
    decoders = decoders_of(updates, model.layout)
    base = FlatVector(model.arrays, model.layout)
    blocks = -(-len(base) // BLOCK_ELEMENTS)
    squares = np.zeros((len(decoders), blocks))

    def combiner() -> Callable[[int, int], None]:
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        origin = np.empty(BLOCK_ELEMENTS)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            size = end - begin
            np.copyto(origin[:size], base.block(begin, end, scratch))
            work = difference[:size]
            for index, decoder in enumerate(decoders):
                np.copyto(work, decoder.block(begin, end, scratch))
                np.subtract(work, origin[:size], out=work)
                np.multiply(work, work, out=work)
                squares[index, begin // BLOCK_ELEMENTS] = work.sum()

        return one_block

    for_each_block(len(base), BLOCK_ELEMENTS, combiner, threads)
    norms: NDArray[np.float64] = np.sqrt(squares.sum(axis=1))
    return norms


def distance(first: Tensors, second: Tensors, *, threads: int | None = None) -> float:
    """Return the L2 distance between two models' floating-point tensors, summed in float64."""
    one, other = FlatVector(first.arrays, first.layout), FlatVector(second.arrays, first.layout)
    squares = np.zeros(-(-len(one) // BLOCK_ELEMENTS))

    def combiner() -> Callable[[int, int], None]:
        scratches = np.empty((3, BLOCK_ELEMENTS), np.float32)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            work, step = difference[: end - begin], scratches[2, : end - begin]
            blocks = one.block(begin, end, scratches[0]), other.block(begin, end, scratches[1])
            np.subtract(*blocks, out=step)
            np.copyto(work, step)
            np.multiply(work, work, out=work)
            squares[begin // BLOCK_ELEMENTS] = work.sum()

        return one_block

    for_each_block(len(one), BLOCK_ELEMENTS, combiner, threads)
    return math.sqrt(squares.sum())


def tensor_norms(
    updates: Sequence[Update], model: Tensors, *, threads: int | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return the L2 norm of update − model for each floating-point tensor: one value per update."""
    decoders = decoders_of(updates, model.layout)
    base = FlatVector(model.arrays, model.layout)
    borders = TensorBorders(model.layout)
    blocks = -(-len(base) // BLOCK_ELEMENTS)
    found: list[list[tuple[str, NDArray[np.float64]]]] = [[] for _ in range(blocks)]

    def combiner() -> Callable[[int, int], None]:
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        origin = np.empty(BLOCK_ELEMENTS)
        difference = np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            size = end - begin
            np.copyto(origin[:size], base.block(begin, end, scratch))
            parts = [(place, n, np.empty(len(decoders))) for place, n in borders.parts(begin, end)]
            work = difference[:size]
            for index, decoder in enumerate(decoders):
                np.copyto(work, decoder.block(begin, end, scratch))
                np.subtract(work, origin[:size], out=work)
                np.multiply(work, work, out=work)
                for place, _, squares in parts:
                    squares[index] = work[place].sum()
            found[begin // BLOCK_ELEMENTS] = [(name, squares) for _, name, squares in parts]

        return one_block

    for_each_block(len(base), BLOCK_ELEMENTS, combiner, threads)
    totals = {t.name: np.zeros(len(decoders)) for t in model.layout.tensors if t.floating}
    for block in found:  # in order of blocks, so the sum always has the same bits
        for name, squares in block:
            totals[name] += squares
    return {name: np.sqrt(total) for name, total in totals.items()}
