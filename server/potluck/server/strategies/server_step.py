"""The server's step: computes the next model from a model and a difference, tensor by tensor.

Computes in float64 and rounds to float32 once, block by block, so that a step needs little memory
in addition to its arrays. The next model overwrites the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.large_arrays import empty
from potluck.server.strategy import Weights

Doubles = NDArray[np.float64]
TensorStep = Callable[[str, slice, Doubles], Doubles]
"""Function of a parameter's name, a slice of its elements in C order, and their difference Δ.

It returns the values to add to these elements. Δ and the values are float64, one-dimensional.
"""

_BLOCK_ELEMENTS: Final = 2**18


def moved(
    model: Weights, difference: Weights, buffers: frozenset[str], step: TensorStep
) -> dict[str, NDArray[Any]]:
    """Return the next model: each parameter plus the result of `step` for its difference.

    The returned arrays are those of `difference`, overwritten if possible. Floating-point buffers
    (running statistics) are not parameters: the difference itself is added to them. Integer tensors
    are taken from `difference`, which has the integer tensors of one client.
    """
    result: dict[str, NDArray[Any]] = {}
    for name, array in model.items():
        if array.dtype.kind != "f":
            result[name] = difference[name]
            continue
        deltas, result[name] = difference[name].reshape(-1), _target(difference[name], array)
        before, after = array.reshape(-1), result[name].reshape(-1)
        for begin in range(0, before.size, _BLOCK_ELEMENTS):
            place = slice(begin, begin + _BLOCK_ELEMENTS)
            delta = deltas[place].astype(np.float64)
            after[place] = before[place] + (delta if name in buffers else step(name, place, delta))
    return result


def _target(difference: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    flags = difference.flags
    if flags.writeable and flags.c_contiguous and difference.dtype == array.dtype:
        return difference
    return empty(array.shape, array.dtype)


def following(arrays: Weights, buffers: frozenset[str]) -> dict[str, NDArray[Any]]:
    """Return arrays for a state's next values. The server's step must overwrite all of them, except
    the arrays of buffers."""
    return {
        name: array if name in buffers else empty(array.shape, array.dtype)
        for name, array in arrays.items()
    }


def doubles(arrays: Weights, name: str, place: slice) -> Doubles:
    """Return the elements `place`, in C order, of the array `name`, as float64."""
    stretch: Doubles = arrays[name].reshape(-1)[place].astype(np.float64)
    return stretch


def zeros(model: Weights) -> dict[str, NDArray[np.float32]]:
    """Return arrays of float32 zeros, one for each floating-point tensor of a model, with its
    shape."""
    return {
        name: filled(array.shape, 0.0) for name, array in model.items() if array.dtype.kind == "f"
    }


def filled(
    shape: tuple[int, ...], value: float, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return an array filled with one value."""
    array = empty(shape, dtype)
    array.fill(value)
    return array


def named(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays under the names that they have in a state: PREFIX/NAME."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def unnamed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return those arrays of a state whose names have this prefix, under their names without the
    prefix."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)
    }
