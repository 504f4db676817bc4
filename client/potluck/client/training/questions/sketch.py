"""The question `sketch`: a local update, compressed to a few numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from potluck.client.question import LocalUpdate, Question, QuestionContext
from potluck.common.errors import ProtocolError, TrainingError

_BLOCK = 1 << 18
_PASSES = 100


@dataclass(frozen=True, kw_only=True)
class Sketch(Question):
    """Answers `sketch-1`, `sketch-2`, …: one local update, compressed, for `hcsfed`.

    method: `projection` adds each coordinate of the update, with a random sign, to a random one of
    `numbers` sums; all clients draw signs and positions with the same `seed`. `centroids` sends the
    centres of a one-dimensional k-means over the coordinates, sorted in ascending order.
    """

    method: Literal["projection", "centroids"] = "projection"
    numbers: Annotated[int, Field(ge=1, le=64)] = 22
    seed: NonNegativeInt = 0

    needs_model = True

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Train once and discard the update; only the sketch is sent."""
        if context.local_update is None:
            raise ProtocolError(
                "question 'sketch' lacks the run's training settings; install the same release "
                "on the host and the coordinator"
            )
        update = context.local_update()
        if not any(array.size for array in update.values()):
            raise TrainingError(f"the model of client '{context.client}' has no parameters")
        if self.method == "projection":
            numbers = projected(update, self.numbers, self.seed)
        else:
            numbers = centroids(update, self.numbers)
        if not all(map(math.isfinite, numbers)):
            raise TrainingError(
                f"the update of client '{context.client}' contains NaN or infinity; lower "
                "training.learning_rate"
            )
        return {f"sketch-{place}": float(number) for place, number in enumerate(numbers, 1)}


def projected(update: LocalUpdate, numbers: int, seed: int) -> NDArray[np.float64]:
    """Apply a sparse projection with entries 0, 1 and −1; it keeps squared norms in expectation.

    The seed, the tensor's name and the position decide which sum a coordinate is added to.
    """
    sums = np.zeros(numbers)
    for name in sorted(update):
        values = update[name].reshape(-1)
        words = (seed, zlib.crc32(name.encode()))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK].astype(np.float64)
            drawn = generator.integers(2 * numbers, size=len(block))
            signed = np.where(drawn % 2, -block, block)
            sums += np.bincount(drawn // 2, weights=signed, minlength=numbers)
    return sums


def centroids(update: LocalUpdate, numbers: int) -> NDArray[np.float64]:
    """Return the sorted centres of a k-means over all coordinates, initialised with quantiles."""
    values = np.sort(np.concatenate([update[name].reshape(-1) for name in sorted(update)]))
    sums = np.concatenate([[0.0], values.cumsum(dtype=np.float64)])
    places = ((np.arange(numbers) + 0.5) / numbers * len(values)).astype(np.int64)
    centres = values[places].astype(np.float64)
    for _ in range(_PASSES):
        borders = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], borders, [len(values)]])
        sizes = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(sizes, 1)
        moved = np.where(sizes > 0, means, centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres
