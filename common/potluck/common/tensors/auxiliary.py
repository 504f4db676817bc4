"""Auxiliaries: tensors sent with a model's weights, in both directions (for example control
variates).

An auxiliary has a name, and one tensor for each floating-point tensor of the model, with the same
name and shape. It is always float32: encodings apply to weights only. In a file, such a tensor is
called `auxiliary/NAME/TENSOR`. The coordinator sends auxiliaries in a separate file; clients send
them within the update's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.encoding import Encoding, encoded_layout
from potluck.common.tensors.flat import check_float32
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import picked, stretch
from potluck.common.tensors.tensor_files import (
    NamedTensors,
    Tensors,
    block_is_within_bounds,
    first_out_of_bounds,
    out_of_bounds,
)

PREFIX: Final = "auxiliary/"

Auxiliaries = Mapping[str, Mapping[str, NDArray[Any]]]
"""Arrays by the auxiliary's name, then by the tensor's name."""


def auxiliary_layout(layout: Layout) -> Layout:
    """Return the layout of one auxiliary of a model."""
    check_float32(layout)
    return Layout.place([(t.name, "F32", t.shape) for t in layout.tensors if t.floating])


def auxiliaries_layout(layout: Layout, names: Iterable[str]) -> Layout:
    """Return the layout of a file that contains only these auxiliaries."""
    return Layout.place(_specifications(layout, names))


def update_layout(layout: Layout, encoding: Encoding, names: Iterable[str]) -> Layout:
    """Return the layout of an update that includes these auxiliaries.

    Raises LayoutError if a tensor of the model has a name that begins with `auxiliary/`.
    """
    encoded = encoded_layout(layout, encoding)
    extra = _specifications(layout, names)
    if not extra:
        return encoded
    for tensor in encoded.tensors:
        if tensor.name.startswith(PREFIX):
            raise LayoutError(
                f"model tensor {quoted(tensor.name)} has a name that is reserved for auxiliary "
                "tensors; rename it",
                tensor=quoted(tensor.name),
            )
    return Layout.place([*((t.name, t.dtype, t.shape) for t in encoded.tensors), *extra])


def joined(auxiliaries: Auxiliaries) -> dict[str, NDArray[Any]]:
    """Return the arrays of auxiliaries under the names that they have in a file."""
    return {
        f"{PREFIX}{name}/{tensor}": array
        for name, arrays in sorted(auxiliaries.items())
        for tensor, array in arrays.items()
    }


def weights_of(file: Tensors) -> Tensors:
    """Return an update's tensors except its auxiliaries; no tensor is copied or read."""
    kept = [t for t in file.layout.tensors if not t.name.startswith(PREFIX)]
    if len(kept) == len(file.layout.tensors):
        return file
    return NamedTensors.some(file, Layout(tuple(kept)))


def auxiliary_of(file: Tensors, name: str, layout: Layout) -> NamedTensors:
    """Return one auxiliary of a file, in the order of the model `layout`; no tensor is copied or
    read.

    Raises LayoutError if a tensor is missing, is not float32, or differs in shape from the model's
    tensor.
    """
    wanted = auxiliary_layout(layout)
    start = f"{PREFIX}{name}/"
    specifications = [
        (tensor.name.removeprefix(start), tensor.dtype, tensor.shape)
        for tensor in file.layout.tensors
        if tensor.name.startswith(start)
    ]
    Layout.place(specifications).check_matches(
        wanted, what=f"auxiliary {quoted(name)}:", whose="model"
    )
    names = {tensor.name: start + tensor.name for tensor in wanted.tensors}
    return NamedTensors(layout=wanted, arrays=picked(file.arrays, names))


def check_auxiliary_numbers(file: Tensors) -> None:
    """Raise NotFiniteError or OutOfBoundsError if an auxiliary tensor contains NaN, infinity or a
    number out of bounds.

    The error names the first such tensor.
    """
    for tensor in file.layout.tensors:
        if not tensor.name.startswith(PREFIX):
            continue
        for begin in range(0, tensor.elements, _BLOCK_ELEMENTS):
            end = min(begin + _BLOCK_ELEMENTS, tensor.elements)
            block = stretch(file.arrays, tensor.name, begin, end)
            if not block_is_within_bounds(block):
                raise out_of_bounds(tensor.name, float(block[first_out_of_bounds(block)]))


_BLOCK_ELEMENTS: Final = 2**16


def zero_auxiliary(layout: Layout) -> dict[str, NDArray[np.float32]]:
    """Return an auxiliary of zeros."""
    return {t.name: np.zeros(t.shape, np.float32) for t in layout.tensors if t.floating}


def _specifications(layout: Layout, names: Iterable[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (f"{PREFIX}{name}/{tensor.name}", "F32", tensor.shape)
        for name in sorted(names)
        for tensor in layout.tensors
        if tensor.floating
    ]
