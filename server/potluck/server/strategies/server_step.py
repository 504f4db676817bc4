"""The server's step: from a model and a difference to the next model, a tensor at a time.

Arithmetic is in float64 and rounded to float32 once, for one tensor at a time, so that a step
takes little memory beside the arrays it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.server.strategy import Weights

Doubles = NDArray[np.float64]
TensorStep = Callable[[str, Doubles], Doubles]
"""(a parameter's name, its difference Δ) -> what to add to it; both float64, of its shape."""


def moved(
    model: Weights, difference: Weights, buffers: frozenset[str], step: TensorStep
) -> dict[str, NDArray[Any]]:
    """The model, each parameter moved by what `step` makes of its difference.

    Floating-point buffers (running statistics) are no parameters: they move by the difference
    itself. Integer tensors are those of `difference`, which carries a client's.
    """
    result: dict[str, NDArray[Any]] = {}
    for name, array in model.items():
        if array.dtype.kind != "f":
            result[name] = difference[name]
            continue
        delta = difference[name].astype(np.float64)
        change = delta if name in buffers else step(name, delta)
        result[name] = (array + change).astype(array.dtype).reshape(array.shape)
    return result


def zeros(model: Weights) -> dict[str, NDArray[np.float32]]:
    """A float32 zero for every floating-point element of a model, by tensor."""
    return {
        name: np.zeros(array.shape, np.float32)
        for name, array in model.items()
        if array.dtype.kind == "f"
    }


def named(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays as a state keeps them: PREFIX/NAME."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def unnamed(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Those arrays of a state that `named` gave this prefix, under their own names."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)
    }
