"""The sum of a round's updates with Gaussian noise; each update is clipped as a whole.

The sum is computed in blocks of parameters, in float64. A block's noise is added before the block
is returned, so no caller sees a sum without noise. Buffers (running statistics) are not summed: the
model keeps its current ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import RunError
from potluck.common.tensors.flat import FlatVector, TensorBorders
from potluck.server.reduce.model_work import OpenedRound
from potluck.server.reduce.move_by_sum import BlockReader
from potluck.server.reduce.update_norms import tensor_norms

# Gaussian noise -----------------------------------------------------------------------------------

Normals = Callable[[int], NDArray[np.float64]]
"""Thread-safe function that returns the given number of independent standard normal numbers."""

_WORD: Final = 2.0**-64


def system_normals(count: int) -> NDArray[np.float64]:
    """Return `count` standard normal numbers, from random bytes of the operating system.

    Box and Muller's transform of 64-bit numbers: all numbers are within ±9.5, which a normal number
    exceeds with probability 3·10⁻²¹. The caller adds them in float64 and rounds the result to
    float32. So the low bits don't show that the transform can't produce every float64 number.
    """
    pairs = -(-count // 2)
    words = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs)
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= _WORD  # in (0, 1]
    radius, angle = uniform
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    angle *= 2.0 * np.pi
    found = np.empty((2, pairs))
    np.cos(angle, out=found[0])
    np.sin(angle, out=found[1])
    found *= radius
    return found.reshape(-1)[:count]


# The noised sum -----------------------------------------------------------------------------------


_PART: Final = 2**16
"""Number of elements added at once: two float64 parts fit into a core's L2 cache."""


@dataclass(frozen=True, kw_only=True)
class NoisedSum:
    """A sum of clipped updates with noise, as a mean over a fixed number of clients.

    The noise is drawn while a block is read, so read each block once. round: the opened updates.
    norms: the L2 norm of each update. clip: maximum norm, over all parameters together. deviation:
    standard deviation of the noise in the sum. clients: number by which the sum is divided.
    """

    round: OpenedRound
    norms: NDArray[np.float64]
    clip: float
    deviation: float
    clients: int
    normals: Normals

    @property
    def weight(self) -> float:
        """The number of updates; all have weight 1."""
        return float(len(self.round.updates))

    @property
    def loss(self) -> float:
        """NaN: losses get no noise, so they are not disclosed."""
        return math.nan

    @property
    def normalizer(self) -> float:
        """1: updates are not normalized."""
        return 1.0

    def mean(self) -> BlockReader:
        """Return a reader of the noisy mean difference from the model."""
        model, borders = self.round.model, TensorBorders(self.round.model.layout)
        base = FlatVector(model.arrays, model.layout)
        scales = (self.clip / np.maximum(self.norms, self.clip)).tolist()

        def read(begin: int, end: int) -> NDArray[np.float64]:
            total = self.deviation * self.normals(end - begin)
            scratch, work = np.empty(_PART, np.float32), np.empty(_PART)
            origin = np.empty(_PART)
            for first in range(begin, end, _PART):
                last = min(first + _PART, end)
                size, part = last - first, total[first - begin : last - begin]
                np.copyto(origin[:size], base.block(first, last, scratch))
                for update, scale in zip(self.round.updates, scales, strict=True):
                    term = work[:size]
                    np.copyto(term, update.block(first, last, scratch))
                    np.subtract(term, origin[:size], out=term)
                    np.multiply(term, scale, out=term)
                    np.add(part, term, out=part)
            total /= self.clients
            for place, name in borders.parts(begin, end):
                if name in self.round.buffers:
                    total[place] = 0.0
            return total

        return read

    def sum(self, auxiliary: str) -> BlockReader:
        """Raise RunError: sums with noise have no auxiliaries."""
        raise RunError(
            f"noise can't be added to the strategy's auxiliary values '{auxiliary}'; choose "
            "another strategy"
        )


@contextmanager
def opened_noised_sum(
    opened: AbstractContextManager[OpenedRound],
    *,
    clip: float,
    noise_multiplier: float,
    clients: int,
    normals: Normals,
) -> Iterator[NoisedSum]:
    """Yield the noisy sum of a round's updates; their files are open while the block runs.

    clip: maximum L2 norm of an update. noise_multiplier: standard deviation of the noise, in units
    of `clip`. clients: number by which the sum is divided, however many updates are in it.
    """
    with opened as found:
        yield NoisedSum(
            round=found,
            norms=_norms(tensor_norms(found.updates, found.model), found.buffers),
            clip=clip,
            deviation=noise_multiplier * clip,
            clients=clients,
            normals=normals,
        )


def _norms(
    by_tensor: Mapping[str, NDArray[np.float64]], buffers: frozenset[str]
) -> NDArray[np.float64]:
    """Return the norm of each update over all its parameters, without buffers."""
    parameters = [norms for name, norms in by_tensor.items() if name not in buffers]
    found: NDArray[np.float64] = np.sqrt(np.sum(np.square(parameters), axis=0))
    return found
