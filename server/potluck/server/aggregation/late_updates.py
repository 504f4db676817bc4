"""Updates that missed their round and join a later one (REFL).

A late update counts as the step that its client took from the model it had, now taken from the
round's: model + (update − the model it had). Running statistics are not steps and are used as they
are. Fresh updates weigh 1. A late one weighs less the older it is, and more the further it is from
the mean of the fresh ones: it may know something that they don't.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.common.tensors.tensor_files import NamedTensors, TensorFile, Tensors
from potluck.server.aggregation.apply_round import OpenUpdates
from potluck.server.aggregation.blocks import BLOCK_ELEMENTS, for_each_block
from potluck.server.aggregation.update_files import SpooledUpdate, UpdateFiles
from potluck.server.store.model_files import ModelFiles

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LateUpdate:
    """An update that joins a round. age: τ ≥ 1, how many rounds it is late. model_blake3: of the
    model that it was trained from."""

    update: SpooledUpdate
    age: int
    model_blake3: str


class RebasedUpdate(EncodedUpdate):
    """A late update as if its client had begun with the round's model."""

    def __init__(
        self,
        late: EncodedUpdate,
        began_with: Tensors,
        current: Tensors,
        buffers: Collection[str] = (),
    ) -> None:
        """began_with: the model it was trained from. current: the round's.

        Raises LayoutError if these do not have the update's layout.
        """
        super().__init__(current, late.layout)
        if began_with.layout != late.layout:
            began_with.layout.check_matches(late.layout, what="model of a late update")
        self._late = late
        self._began_with = FlatVector(began_with.arrays, late.layout)
        self._current = FlatVector(current.arrays, late.layout)
        self._borders, self._buffers = TensorBorders(late.layout), frozenset(buffers)

    def block(self, begin: int, end: int, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Weights [begin, end), in `scratch`."""
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Weights [begin, end), in `out`."""
        self._late.read(begin, end, out)
        parts = self._borders.parts(begin, end) if self._buffers else ()
        kept = [(place, out[place].copy()) for place, name in parts if name in self._buffers]
        out -= self._began_with.block(begin, end)
        out += self._current.block(begin, end)
        for place, values in kept:
            out[place] = values
        return out


def staleness_weight(age: int, deviation: float, beta: float) -> float:
    """Return (1 − β)/(τ + 1) + β(1 − exp(−Λ/Λ_max)), a late update's weight; a fresh one has 1.

    age: τ ≥ 1. deviation: Λ/Λ_max in [0, 1]. beta: in [0, 1]. The result is in [0, 1).
    """
    return (1 - beta) / (age + 1) + beta * -math.expm1(-deviation)


def shares_of_largest(deviations: Floats) -> Floats:
    """Return Λ/Λ_max, the same for Λ = ‖u − ū‖²/‖ū‖² and for ‖u − ū‖²; 0 if all are 0."""
    largest = float(deviations.max(initial=0.0))
    return deviations / largest if largest > 0 else np.zeros(len(deviations))


def deviations_from_mean(
    fresh: Sequence[EncodedUpdate],
    late: Sequence[EncodedUpdate],
    current: Tensors,
    buffers: Collection[str],
    *,
    threads: int | None = None,
) -> Floats:
    """Return ‖u_s − ū‖² of each late update: its squared distance from the plain mean of fresh
    ones.

    Over parameters, in float64, block by block. The model that both started from cancels out.
    """
    borders, elements = TensorBorders(current.layout), current.layout.parameters
    squares = np.zeros((len(late), -(-elements // BLOCK_ELEMENTS)))

    def combiner() -> Callable[[int, int], None]:
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        means, works = np.empty(BLOCK_ELEMENTS), np.empty(BLOCK_ELEMENTS)

        def one_block(begin: int, end: int) -> None:
            mean, work = means[: end - begin], works[: end - begin]
            mean.fill(0)
            for update in fresh:
                np.copyto(work, update.block(begin, end, scratch))
                np.add(mean, work, out=mean)
            np.divide(mean, len(fresh), out=mean)
            aside = [p for p, name in borders.parts(begin, end) if name in buffers]
            for index, update in enumerate(late):
                np.copyto(work, update.block(begin, end, scratch))
                np.subtract(work, mean, out=work)
                for place in aside:
                    work[place] = 0
                np.multiply(work, work, out=work)
                squares[index, begin // BLOCK_ELEMENTS] = work.sum()

        return one_block

    for_each_block(elements, BLOCK_ELEMENTS, combiner, threads)
    found: Floats = squares.sum(axis=1)
    return found


@contextlib.contextmanager
def joined_by_late(
    fresh: OpenUpdates,
    late: Sequence[LateUpdate],
    files: UpdateFiles,
    models: ModelFiles,
    current: Tensors,
    buffers: Collection[str],
    beta: float,
) -> Iterator[OpenUpdates]:
    """The fresh updates with the late ones behind them, while the block runs. current: the round's
    model, of the layout of the updates. Raises LayoutError, NotFoundError."""
    if not late:
        yield fresh
        return
    with contextlib.ExitStack() as stack:
        opened: list[TensorFile] = []
        rebased: list[RebasedUpdate] = []
        for each in late:
            path, compressed = each.update.path, each.update.row.compressed
            opened.append(stack.enter_context(files.open(path, compressed=compressed)))
            whole = stack.enter_context(models.opened(each.model_blake3))
            began_with = NamedTensors.some(whole, files.layout)
            encoded = files.weights(opened[-1], began_with if files.delta else None)
            rebased.append(RebasedUpdate(encoded, began_with, current, buffers))
        deviations = deviations_from_mean(fresh.encoded, rebased, current, buffers)
        shares = shares_of_largest(deviations).tolist()
        factors = [
            staleness_weight(each.age, share, beta)
            for each, share in zip(late, shares, strict=True)
        ]
        yield fresh.joined_by([each.update for each in late], opened, rebased, factors)
