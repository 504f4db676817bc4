"""The unmasked update of a training, as differences in memory: it is never written to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.flat import FlatVector
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import Tensors

_BLOCK: Final = 2**18
"""Number of elements subtracted at once."""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The update of a training, before it is masked.

    body, auxiliaries: float32, the length of the model's floating-point vector; masking writes over
    them. layout: the model's. buffers: names of its floating-point tensors that are not parameters.
    """

    body: NDArray[np.float32] = field(repr=False)
    auxiliaries: Mapping[str, NDArray[np.float32]] = field(repr=False)
    layout: Layout
    buffers: frozenset[str]


def differences(
    arrays: Mapping[str, NDArray[Any]],
    base: Tensors,
    buffers: frozenset[str],
    auxiliaries: Mapping[str, Mapping[str, NDArray[Any]]],
) -> Differences:
    """Return copies of a trained model's differences from `base` and of the auxiliaries."""
    layout = base.layout
    trained, origin = FlatVector(arrays, layout), FlatVector(base.arrays, layout)
    body = _joined(trained)
    for begin in range(0, body.size, _BLOCK):
        some = body[begin : begin + _BLOCK]
        some -= origin.block(begin, begin + some.size)
    beside = {name: _joined(FlatVector(each, layout)) for name, each in auxiliaries.items()}
    return Differences(body=body, auxiliaries=beside, layout=layout, buffers=buffers)


def _joined(vector: FlatVector) -> NDArray[np.float32]:
    return vector.read(0, len(vector), np.empty(len(vector), np.float32))
