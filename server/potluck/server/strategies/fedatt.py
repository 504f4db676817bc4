"""FedAtt: for each tensor, clients that are farther from the model get more attention (Ji et al.
2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat

from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, equal_shares
from potluck.server.strategies.server_step import moved
from potluck.server.strategy import Combine, RoundContext, Statistic, UpdateStatistics, Weights


@dataclass(frozen=True, kw_only=True)
class FedAtt(Averaging):
    """Averages each tensor, with larger weights for clients far from the model.

    For each tensor: s_k = ‖w − w_k‖, a = softmax(s), w ← w − ε·Σ a_k (w − w_k).

    step_size: ε > 0. The default 1.2 is that of the authors' code; above 1, the step overshoots the
    weighted mean of the clients' models.

    The norms are Frobenius norms, for tensors of any shape. Numbers of samples have no effect.
    Large tensors have large distances, and the softmax then gives nearly all attention to one
    client. The paper adds noise to the result. This noise is omitted here, because it does not
    protect clients.
    """

    step_size: PositiveFloat = 1.2

    needs = frozenset({Statistic.TENSOR_NORMS})
    individual = True
    by_samples = False

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean difference, with attention weights for each parameter and equal weights
        for buffers."""
        norms = statistics.tensor_norms or {}
        equal = equal_shares(len(statistics.clients))
        return Combine(
            weights=equal,
            difference=True,
            tensor_weights={
                name: equal if name in statistics.buffers else attention(distances)
                for name, distances in norms.items()
            },
        )

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the model after one step of size ε; the state stays the same."""
        return (
            moved(model, combined, context.buffers, lambda _, __, delta: self.step_size * delta),
            state,
        )


def attention(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the softmax of distances; the maximum is subtracted first to avoid overflow."""
    exponentials = np.exp(distances - distances.max())
    return np.asarray(exponentials / exponentials.sum())
