"""Computes facts about a round's updates in one pass, by blocks in float64.

An update here means its difference from the round's model, in the floating-point tensors that are
parameters. Sums are computed within spans of the vector, then over spans in order, so the result
has the same bits, whichever thread processes which span.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.learning.output_layer import output_tensor
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.stored_tensors import forms
from potluck.common.tensors.tensor_files import Tensors
from potluck.server.reduce.blocks import BLOCK_ELEMENTS, for_each_block
from potluck.server.reduce.update_files import Update, decoders_of
from potluck.server.selection import SKETCH_SIZE, Floats, UpdateFact

_BLOCK_NUMBERS: Final = 2**20
"""Total number of elements, of all updates together, that each thread processes at once."""
_SPANS: Final = 64
_MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def read_facts(
    wanted: Collection[UpdateFact],
    updates: Sequence[Update],
    model: Tensors,
    *,
    seed: int,
    buffers: Collection[str],
    classes: int,
    threads: int | None = None,
) -> dict[str, Floats]:
    """Return the wanted facts, in the order of the updates, by their field name in `UpdateFacts`.

    seed: seed of the sketches. buffers: floating-point tensors that are not parameters. classes:
    number of classes of the task, which identifies the output layer. Raises LayoutError if an
    update does not fit the model, RunError if the model has no recognisable output layer.
    """
    decoders = decoders_of(updates, model.layout)
    fields = {
        UpdateFact.GRAM: "gram",
        UpdateFact.SKETCH: "sketches",
        UpdateFact.NORM: "norms",
    }
    summed = fields.keys() & set(wanted)
    found: dict[str, Floats] = {}
    if summed:
        sums = _sums(decoders, model, buffers, seed, summed, threads)
        found |= {fields[fact]: sums[fact] for fact in summed}
    if UpdateFact.OUTPUT_MOVE in wanted:
        found["output_moves"] = _output_moves(decoders, model, classes)
    return found


def gram(updates: Sequence[Update], model: Tensors, *, threads: int | None = None) -> Floats:
    """Return the inner products of all pairs of updates, over all floating-point tensors.

    updates × updates, float64. Needs memory for 64 such matrices, one per span of the vector.
    Raises LayoutError if an update does not fit the model.
    """
    decoders = decoders_of(updates, model.layout)
    return _sums(decoders, model, (), 0, {UpdateFact.GRAM}, threads)[UpdateFact.GRAM]


def _sums(
    decoders: Sequence[EncodedUpdate],
    model: Tensors,
    buffers: Collection[str],
    seed: int,
    wanted: Collection[UpdateFact],
    threads: int | None,
) -> dict[UpdateFact, Floats]:
    """Return the Gram matrix, the sketches and the norms; zeros for facts that are not wanted."""
    pairs, sketched = UpdateFact.GRAM in wanted, UpdateFact.SKETCH in wanted
    measured = UpdateFact.NORM in wanted
    base = FlatVector(model.arrays, model.layout)
    borders, count = TensorBorders(model.layout), len(decoders)
    block = max(1, min(BLOCK_ELEMENTS, _BLOCK_NUMBERS // count))
    span = block * max(1, -(-len(base) // (block * _SPANS)))
    spans = -(-len(base) // span)
    grams = np.zeros((spans if pairs else 0, count, count))
    sketches = np.zeros((spans if sketched else 0, count, SKETCH_SIZE))
    squares = np.zeros((spans if measured else 0, count))

    def combiner() -> Callable[[int, int], None]:
        scratch, differences = np.empty(block, np.float32), np.empty((count, block))

        def one_block(begin: int, end: int, into: int) -> None:
            rows = differences[:, : end - begin]
            origin = base.block(begin, end, scratch).astype(np.float64)
            for row, decoder in zip(rows, decoders, strict=True):
                np.copyto(row, decoder.block(begin, end, scratch))
                np.subtract(row, origin, out=row)
            if buffers:
                for place, name in borders.parts(begin, end):
                    if name in buffers:
                        rows[:, place] = 0.0
            if pairs:
                grams[into] += rows @ rows.T
            if measured:
                squares[into] += np.square(rows).sum(axis=1)
            if sketched:
                places, signs = _projection(seed, begin, end)
                for sketch, row in zip(sketches[into], rows, strict=True):
                    sketch += np.bincount(places, signs * row, SKETCH_SIZE)

        def one_span(begin: int, end: int) -> None:
            for first in range(begin, end, block):
                one_block(first, min(first + block, end), begin // span)

        return one_span

    for_each_block(len(base), span, combiner, threads)
    return {
        UpdateFact.GRAM: grams.sum(axis=0),
        UpdateFact.SKETCH: sketches.sum(axis=0),
        UpdateFact.NORM: np.sqrt(squares.sum(axis=0)),
    }


def _projection(seed: int, begin: int, end: int) -> tuple[NDArray[np.int64], Floats]:
    """Return, for each element of [begin, end), its index in a sketch and its sign.

    Both are computed with the mixing function of SplitMix64 (Steele et al. 2014), so they need not
    be stored.
    """
    add, first, second = (np.uint64(word) for word in _MIX)
    with np.errstate(over="ignore"):
        mixed = (np.arange(begin, end, dtype=np.uint64) + np.uint64(seed % 2**64) * second) * add
        mixed = (mixed ^ (mixed >> np.uint64(30))) * first
        mixed = (mixed ^ (mixed >> np.uint64(27))) * second
        mixed ^= mixed >> np.uint64(31)
    places = (mixed % np.uint64(SKETCH_SIZE)).astype(np.int64)
    signs = np.where((mixed >> np.uint64(32)) & np.uint64(1), 1.0, -1.0)
    return places, signs


def _output_moves(decoders: Sequence[EncodedUpdate], model: Tensors, classes: int) -> Floats:
    """Return each update's mean change of the output layer's numbers of each class, updates ×
    classes."""
    name = output_tensor(forms(model.arrays), classes)
    if name is None:
        raise RunError(
            f"the model has no output layer of {classes} classes, whose changes the selector "
            "needs; choose another selector, or give the task's model such a layer"
        )
    begin = 0
    for tensor in model.layout.tensors:
        if tensor.name == name:
            break
        begin += tensor.elements if tensor.floating else 0
    before = model.arrays[name].astype(np.float64).reshape(classes, -1)
    moves = np.empty((len(decoders), classes))
    for move, decoder in zip(moves, decoders, strict=True):
        after = decoder.read(begin, begin + before.size, np.empty(before.size, np.float32))
        move[:] = (after.astype(np.float64).reshape(before.shape) - before).mean(axis=1)
    return moves
