"""FedAvg's mean, which most strategies derive from: weights by samples, no state."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from potluck.server.state import State
from potluck.server.strategy import (
    Combine,
    Counts,
    RoundContext,
    Strategy,
    UpdateStatistics,
    Weights,
)

Memory = Annotated[float, Field(ge=0, lt=1)]
"""The share of the past that a mean over time keeps in each round."""


class Averaging(Strategy):
    """A strategy to derive from: the mean, weighted by samples, is the next model."""

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


def shares(samples: Counts) -> NDArray[np.float64]:
    """p_k = n_k / Σ n_j over the updates that arrived."""
    numbers = samples.astype(np.float64)
    return np.asarray(numbers / numbers.sum())


def equal_shares(updates: int) -> NDArray[np.float64]:
    """1 / updates, for each."""
    return np.full(updates, 1.0 / updates)
