"""The floating-point tensors of a model as one vector that is never joined.

Everything that works on a model block by block (encoding, statistics, reduction) sees it as a
vector of `layout.parameters` elements: the floating-point tensors in the layout's order, each in
C order. Blocks cross the borders of tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.layout import Layout, quoted


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
    """The floating-point tensor that element `position` of the vector belongs to."""
    for tensor in layout.tensors:
        if tensor.floating:
            position -= tensor.elements
            if position < 0:
                return tensor.name
    raise IndexError(f"a model of {layout.parameters} parameters has none further on")


class FlatVector:
    """A read-only view of named arrays as one vector, of whatever type they have."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> None:
        """`arrays` holds at least the floating-point tensors of `layout`, by name."""
        floating = [tensor for tensor in layout.tensors if tensor.floating and tensor.elements]
        self._flats = [arrays[tensor.name].reshape(-1) for tensor in floating]
        self._begins = [0, *accumulate(tensor.elements for tensor in floating)]

    def __len__(self) -> int:
        return self._begins[-1]

    def pieces(self, begin: int, end: int) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Elements [begin, end) as views, each with its place in the block."""
        index = bisect_right(self._begins, begin) - 1
        position = begin
        while position < end:
            first = self._begins[index]
            stop = min(end, self._begins[index + 1])
            piece = self._flats[index][position - first : stop - first]
            yield slice(position - begin, stop - begin), piece
            position = stop
            index += 1

    def block(self, begin: int, end: int, scratch: NDArray[Any]) -> NDArray[Any]:
        """Elements [begin, end): a view where one tensor holds them all, else in `scratch`."""
        index = bisect_right(self._begins, begin) - 1
        if begin < end <= self._begins[index + 1]:
            first = self._begins[index]
            return self._flats[index][begin - first : end - first]
        for place, piece in self.pieces(begin, end):
            scratch[place] = piece
        return scratch[: end - begin]


class TensorBorders:
    """Begin and end of each floating-point tensor of a layout in the vector."""

    def __init__(self, layout: Layout) -> None:
        floating = [tensor for tensor in layout.tensors if tensor.floating and tensor.elements]
        self._names = [tensor.name for tensor in floating]
        self._begins = [0, *accumulate(tensor.elements for tensor in floating)]

    def parts(self, begin: int, end: int) -> list[tuple[slice, str]]:
        """The parts of the block [begin, end) that belong to one tensor each, and its name."""
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
    """Named arrays in the layout's order: views of `vector`, and `others` for the other types."""
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
