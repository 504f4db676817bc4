"""The floating-point tensors of a model as one vector, without copying them into one array.

All code that processes a model block by block (encoding, statistics, reduction) treats it as a
vector of `layout.parameters` elements: the floating-point tensors in the layout's order, each in C
order. A block may span several tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import StoredTensor, StoredTensors


def check_float32(layout: Layout) -> None:
    """Raise LayoutError unless every floating-point tensor of a model is float32."""
    for tensor in layout.tensors:
        if tensor.floating and tensor.dtype != "F32":
            raise LayoutError(
                f"model tensor {quoted(tensor.name)} is {tensor.dtype}; "
                "make the model's floating-point tensors float32",
                tensor=quoted(tensor.name),
            )


def name_at(layout: Layout, position: int) -> str:
    """Return the name of the floating-point tensor that contains element `position` of the
    vector."""
    for tensor in layout.tensors:
        if tensor.floating:
            position -= tensor.elements
            if position < 0:
                return tensor.name
    raise IndexError(f"the position is beyond the {layout.parameters} parameters of the model")


class FlatVector:
    """A read-only view of named arrays as one vector, with the arrays' element type.

    Reading raises StorageError for arrays in files. It is thread-safe.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> None:
        """arrays: at least the floating-point tensors of `layout`, by name."""
        names = [tensor.name for tensor in layout.tensors if tensor.floating and tensor.elements]
        self._sources: Sequence[NDArray[Any] | StoredTensor]
        if isinstance(arrays, StoredTensors):
            self._sources = _joined([arrays.stored[name] for name in names])
        else:
            self._sources = [arrays[name].reshape(-1) for name in names]
        self._begins = [0, *accumulate(source.size for source in self._sources)]

    def __len__(self) -> int:
        return self._begins[-1]

    def block(self, begin: int, end: int, scratch: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return elements [begin, end).

        Returns a view if one array in memory has all of them, else a copy in `scratch`, or in a new
        array.
        """
        index = bisect_right(self._begins, begin) - 1
        if not begin < end:
            return np.empty(0, np.float32) if scratch is None else scratch[:0]
        source = self._sources[index]
        if isinstance(source, np.ndarray) and end <= self._begins[index + 1]:
            first = self._begins[index]
            return source[begin - first : end - first]
        if scratch is None:
            scratch = np.empty(end - begin, source.dtype)
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[Any]) -> NDArray[Any]:
        """Copy elements [begin, end) into `out`, which has end − begin elements."""
        index = bisect_right(self._begins, begin) - 1
        position = begin
        while position < end:
            source, first = self._sources[index], self._begins[index]
            stop = min(end, self._begins[index + 1])
            place = out[position - begin : stop - begin]
            if isinstance(source, np.ndarray):
                np.copyto(place, source[position - first : stop - first])
            else:
                source.read_into(place, position - first)
            position, index = stop, index + 1
        return out


def _joined(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """Return the tensors as vectors; neighbours in a file are joined into one vector."""
    found: list[StoredTensor] = []
    sizes: list[int] = []
    end = -1
    for each in tensors:
        size = each.size
        last = found[-1] if found else None
        same = last is not None and last.file is each.file and last.dtype == each.dtype
        if same and each.begin == end:
            sizes[-1] += size
        else:
            found.append(each)
            sizes.append(size)
        end = each.begin + size * each.dtype.itemsize
    return [replace(each, shape=(size,)) for each, size in zip(found, sizes, strict=True)]


class TensorBorders:
    """Positions at which each floating-point tensor of a layout begins and ends in the vector."""

    def __init__(self, layout: Layout) -> None:
        floating = [tensor for tensor in layout.tensors if tensor.floating and tensor.elements]
        self._names = [tensor.name for tensor in floating]
        self._begins = [0, *accumulate(tensor.elements for tensor in floating)]

    def parts(self, begin: int, end: int) -> list[tuple[slice, str]]:
        """Split the block [begin, end) by tensor; return (slice of the block, name of its tensor)
        for each part."""
        parts: list[tuple[slice, str]] = []
        index = bisect_right(self._begins, begin) - 1
        position = begin
        while position < end:
            stop = min(end, self._begins[index + 1])
            parts.append((slice(position - begin, stop - begin), self._names[index]))
            position = stop
            index += 1
        return parts


def unflatten(
    vector: NDArray[Any], others: Mapping[str, NDArray[Any]], layout: Layout
) -> dict[str, NDArray[Any]]:
    """Return named arrays in the layout's order: views of `vector`, and the arrays in `others` for
    the tensors that are not floating-point."""
    arrays: dict[str, NDArray[Any]] = {}
    position = 0
    for tensor in layout.tensors:
        if tensor.floating:
            flat = vector[position : position + tensor.elements]
            arrays[tensor.name] = flat.reshape(tensor.shape)
            position += tensor.elements
        else:
            arrays[tensor.name] = others[tensor.name]
    return arrays
