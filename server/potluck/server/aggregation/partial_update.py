"""Updates that omit whole tensors.

An omitted tensor is read as unchanged, and the update is excluded from the mean of that tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.encoding import EncodedUpdate, Encoding
from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.tensor_files import NamedTensors, Tensors
from potluck.server.selection import Floats
from potluck.server.strategy import Combine


class PartialUpdate(EncodedUpdate):
    """An update that omits some tensors. These are read with the values of the round's model."""

    def __init__(
        self,
        file: Tensors,
        model: Tensors,
        dropped: Collection[str],
        encoding: Encoding,
        *,
        delta: bool,
    ) -> None:
        """model: the round's model, with the tensors of complete updates. delta: True if the file
        contains differences from the model.

        Raises LayoutError if the file's tensors aren't exactly those that are not dropped.
        """
        left = model.layout.without_names(dropped)
        base = NamedTensors.some(model, left) if delta else None
        super().__init__(file, left, encoding, base)
        self.layout = model.layout
        self._model = FlatVector(model.arrays, model.layout)
        self._borders = TensorBorders(model.layout)
        self._missing: dict[str, int] = {}
        """For each tensor, the number of elements by which its offset in the file is smaller than
        in the complete layout; -1 if omitted."""
        ahead = 0
        for tensor in model.layout.tensors:
            if tensor.floating:
                self._missing[tensor.name] = -1 if tensor.name in dropped else ahead
                ahead += tensor.elements if tensor.name in dropped else 0

    def block(
        self, begin: int, end: int, scratch: NDArray[np.float32]
    ) -> NDArray[np.floating[Any]]:
        """See `EncodedUpdate.block`; always in `scratch`."""
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `EncodedUpdate.read`."""
        for place, name in self._borders.parts(begin, end):
            first, last, ahead = begin + place.start, begin + place.stop, self._missing[name]
            if ahead < 0:
                self._model.read(first, last, out[place])
            else:
                super().read(first - ahead, last - ahead, out[place])
        return out


def shares_sent(layout: Layout, dropped: Sequence[Collection[str]]) -> Floats:
    """Return, for each update, the share of the model's floating-point elements that it contains.

    layout: layout of complete updates.
    """
    sizes = {tensor.name: tensor.elements for tensor in layout.tensors if tensor.floating}
    missing = np.array([sum(sizes[name] for name in names) for names in dropped])
    shares: Floats = 1.0 - missing / max(1, layout.parameters)
    return shares


def renormalized(combine: Combine, dropped: Sequence[Collection[str]]) -> Combine:
    """Return the reduction with each tensor averaged over only the updates that have it.

    dropped: for each update, the tensors that it omits. The weights of the remaining updates are
    scaled to the same sum. A tensor that no weighted update has does not change.
    """
    names = sorted(set[str]().union(*dropped))
    if not names:
        return combine
    changed = dict(combine.tensor_weights)
    for name in names:
        weights = changed.get(name, combine.weights)
        sent = np.where([name in each for each in dropped], 0.0, weights)
        total = sent.sum()
        if total != 0:
            changed[name] = sent * (weights.sum() / total)
    return replace(combine, tensor_weights=changed)
