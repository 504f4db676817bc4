"""Updates that missed their round and join a later one (REFL).

A late update is rebased: the client's difference is added to the round's model, which gives model +
(update − the client's old model). Running statistics are used unchanged. Fresh updates have the
weight 1. The weight of a late update falls with its age. It rises with its distance from the mean
of the fresh updates, because a distant update may contain information that the fresh ones lack.
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
from potluck.server.reduce.apply_round import OpenUpdates
from potluck.server.reduce.blocks import BLOCK_ELEMENTS, for_each_block
from potluck.server.reduce.update_files import SpooledUpdate, UpdateFiles
from potluck.server.store.model_files import ModelFiles

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LateUpdate:
    """A late update that joins a round. age: τ ≥ 1, number of rounds it is late. model_blake3:
    digest of the model from which its client started."""

    update: SpooledUpdate
    age: int
    model_blake3: str


class RebasedUpdate(EncodedUpdate):
    """A late update, rebased as if its client had started from the round's model."""

    def __init__(
        self,
        late: EncodedUpdate,
        began_with: Tensors,
        current: Tensors,
        buffers: Collection[str] = (),
    ) -> None:
        """began_with: the model from which the client started. current: the round's model.

        Raises LayoutError if a model does not have the update's layout.
        """
        super().__init__(current, late.layout)
        if began_with.layout != late.layout:
            began_with.layout.check_matches(late.layout, what="model of a late update")
        self._late = late
        self._began_with = FlatVector(began_with.arrays, late.layout)
        self._current = FlatVector(current.arrays, late.layout)
        self._borders, self._buffers = TensorBorders(late.layout), frozenset(buffers)

    def block(self, begin: int, end: int, scratch: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return elements [begin, end) of the rebased weights, computed in `scratch`."""
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Write elements [begin, end) of the rebased weights into `out`, and return it."""
        self._late.read(begin, end, out)
        parts = self._borders.parts(begin, end) if self._buffers else ()
        kept = [(place, out[place].copy()) for place, name in parts if name in self._buffers]
        out -= self._began_with.block(begin, end)
        out += self._current.block(begin, end)
        for place, values in kept:
            out[place] = values
        return out


def staleness_weight(age: int, deviation: float, *, beta: float, divisor: float = 1.0) -> float:
    """Return a late update's weight, (1 − β)/(τ + 1) + β(1 − exp(−Λ/Λ_max)/d), in [0, 1).

    A fresh update has the weight 1. age: τ ≥ 1, number of rounds late. deviation: Λ/Λ_max in [0,
    1], relative distance from the mean of the fresh updates. beta: β in [0, 1]. divisor: d ≥ 1; 1
    in the REFL paper, 10 in its authors' program.
    """
    least = 1 - 1 / divisor
    return (1 - beta) / (age + 1) + beta * (least - math.expm1(-deviation) / divisor)


def shares_of_largest(deviations: Floats) -> Floats:
    """Return Λ/Λ_max of each late update; zeros if all Λ are 0.

    deviations: ‖u − ū‖². Λ in the REFL paper is ‖u − ū‖²/‖ū‖², which gives the same quotients.
    """
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
    """Return ‖u_s − ū‖² of each late update: its squared distance from the mean of the fresh
    updates.

    The mean is unweighted. Sums are over parameters, in float64, block by block. The rebased
    updates and the fresh ones have the same starting model, which cancels out.
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
    weight: Callable[[int, float], float],
) -> Iterator[OpenUpdates]:
    """Open the late updates while the block runs; yield the fresh updates, then the late ones.

    current: the round's model, in the layout of the updates. weight: `staleness_weight` of the run.
    Raises LayoutError, NotFoundError."""
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
        factors = [weight(each.age, share) for each, share in zip(late, shares, strict=True)]
        yield fresh.joined_by([each.update for each in late], opened, rebased, factors)
