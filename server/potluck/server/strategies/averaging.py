"""What most strategies have in common: weights by samples, nothing beside the weights, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import Weighting
from potluck.common.learning.training import LocalTraining
from potluck.server.state import State
from potluck.server.strategy import (
    Combine,
    Correction,
    RoundContext,
    Statistic,
    UpdateStatistics,
    Weights,
)


class Averaging:
    """A strategy to derive from: the mean, weighted by samples, is the next model."""

    @property
    def auxiliary(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @property
    def correction(self) -> Correction | None:
        """None."""
        return None

    @property
    def needs(self) -> frozenset[Statistic]:
        """Nothing."""
        return frozenset()

    @property
    def individual(self) -> bool:
        """A weighted mean can be had without seeing any single update."""
        return False

    def review(
        self,
        training: LocalTraining,  # noqa: ARG002  part of the seam
        weighting: Weighting,  # noqa: ARG002  likewise
    ) -> Sequence[str]:
        """It goes with everything."""
        return ()

    def init(self, model: Weights) -> State:  # noqa: ARG002  part of the seam
        """An empty state."""
        return State()

    def broadcast(self, state: State) -> Mapping[str, Weights]:  # noqa: ARG002  part of the seam
        """Nothing."""
        return {}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:  # noqa: ARG002  as above
        """Nothing."""
        return {}

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """The mean by samples; their weights sum to 1."""
        return Combine(weights=shares(statistics.samples))

    def apply(
        self,
        state: State,
        model: Weights,  # noqa: ARG002  part of the seam
        combined: Weights,
        context: RoundContext,  # noqa: ARG002  part of the seam
    ) -> tuple[Weights, State]:
        """The mean is the next model."""
        return combined, state


def shares(samples: NDArray[np.int64]) -> NDArray[np.float64]:
    """p_k = n_k / Σ n_j over the updates that arrived."""
    numbers = samples.astype(np.float64)
    return np.asarray(numbers / numbers.sum())


def equal_shares(updates: int) -> NDArray[np.float64]:
    """1 / updates, for each."""
    return np.full(updates, 1.0 / updates)
