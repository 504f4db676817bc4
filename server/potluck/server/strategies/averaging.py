"""Base class of most strategies: FedAvg's mean, weighted by samples, without state."""

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
"""Weight of the old value in a moving average."""


class Averaging(Strategy):
    """Base class: the mean of the updates, weighted by samples, is the next model."""

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean of the updates, weighted by samples; the weights sum to 1."""
        return Combine(weights=shares(statistics.samples))

    def apply(
        self,
        state: State,
        model: Weights,  # noqa: ARG002  part of the interface
        combined: Weights,
        context: RoundContext,  # noqa: ARG002  part of the interface
    ) -> tuple[Weights, State]:
        """Return the mean as the next model."""
        return combined, state


def shares(samples: Counts) -> NDArray[np.float64]:
    """Return the weights p_k = n_k / Σ n_j of the updates that arrived, with n_k samples each."""
    numbers = samples.astype(np.float64)
    return np.asarray(numbers / numbers.sum())


def equal_shares(updates: int) -> NDArray[np.float64]:
    """Return the weight 1 / updates for each update."""
    return np.full(updates, 1.0 / updates)
