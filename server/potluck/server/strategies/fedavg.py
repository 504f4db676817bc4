"""FedAvg: the mean of the updates, weighted by their samples (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

import numpy as np

from potluck.server.state import State
from potluck.server.strategy import Combine, UpdateStatistics, Weights


class FedAvg:
    """w ← Σ p_k w_k with p_k = n_k / Σ n_j over the updates that arrived; keeps no state.

    The paper's listing prints n_k / n with n over all clients, which shrinks the model whenever
    not all of them are selected; its text means the ones taking part.
    """

    @property
    def auxiliary(self) -> frozenset[str]:
        """None."""
        return frozenset()

    @property
    def needs_norms(self) -> bool:
        """It does not."""
        return False

    def init(self, model: Weights) -> State:  # noqa: ARG002  part of the seam
        """An empty state."""
        return State()

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Weights proportional to the samples; their sum is 1."""
        samples = statistics.samples.astype(np.float64)
        return Combine(weights=samples / samples.sum())

    def apply(self, state: State, model: Weights, combined: Weights) -> tuple[Weights, State]:  # noqa: ARG002  part of the seam
        """The mean is the next model."""
        return combined, state
