"""Updates that a host adds up: each client's differences from the model, in fixed point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import FileDigest, Tensors
from potluck.common.updates.fixed_point import (
    FixedPointTerms,
    Words,
    members_digest,
    normalizer_of,
    quantise,
)
from potluck.common.updates.sum_files import AUXILIARY, BODY, WordReader, vectors_of, write_sum_file
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

SUM: Final = transfer_pb2.ENCODING_SUM

_Arrays = Mapping[str, NDArray[Any]]


def fixed_point_terms(work: rpc.Train) -> FixedPointTerms:
    """Return an instruction's terms of fixed point. Raises LayoutError if they are out of range."""
    asked = work.summing
    terms = FixedPointTerms(
        quantum_bits=asked.quantum_bits,
        weight_unit=asked.weight_unit,
        weight_cap=asked.weight_cap,
    )
    terms.check()
    return terms


def write_summable_update(
    path: Path,
    instruction: rpc.Instruction,
    trained: _Arrays,
    base: Tensors,
    report: UpdateReport,
    *,
    buffers: frozenset[str],
    auxiliaries: Mapping[str, _Arrays],
    over: Path | None,
) -> FileDigest:
    """Write a client's update as a sum of one update. Blocks the calling thread.

    base: the round's model. report: the report as disclosed; its samples are the weight. buffers:
    names of floating-point tensors that are not parameters and so are not normalised. over: a spare
    file to overwrite. Raises LayoutError, OutOfBoundsError if a word can't hold a difference,
    StorageError.
    """
    work, layout = instruction.train, base.layout
    terms = fixed_point_terms(work)
    divisor = normalizer_of(report) if work.normalized else 1.0
    factor = terms.factor(terms.weight(report.samples))
    vector, origin = FlatVector(trained, layout), FlatVector(base.arrays, layout)

    def difference(begin: int, end: int) -> NDArray[np.float64]:
        values = _copied(vector, begin, end)
        values -= origin.block(begin, end)
        if divisor != 1.0:
            _divide(values, begin, divisor, layout, buffers)
        return values

    readers = {BODY: _words(difference, factor)}
    for name, arrays in auxiliaries.items():
        beside = partial(_copied, FlatVector(arrays, layout))
        readers[AUXILIARY + name] = _words(beside, 1.0 / terms.quantum)
    vectors = vectors_of(layout.parameters, auxiliaries)
    return write_sum_file(path, readers, vectors, members_digest([instruction.id]), over=over)


def _copied(vector: FlatVector, begin: int, end: int) -> NDArray[np.float64]:
    return vector.read(begin, end, np.empty(end - begin, np.float64))


def _divide(
    values: NDArray[np.float64],
    begin: int,
    divisor: float,
    layout: Layout,
    buffers: frozenset[str],
) -> None:
    for place, name in TensorBorders(layout).parts(begin, begin + values.size):
        if name not in buffers:
            values[place] /= divisor


def _words(read: Callable[[int, int], NDArray[np.float64]], factor: float) -> WordReader:
    def words(begin: int, end: int) -> Words:
        out = np.empty(end - begin, np.int64)
        quantise(read(begin, end), factor, out)
        return out

    return words
