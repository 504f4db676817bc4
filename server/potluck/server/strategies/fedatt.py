"""FedAtt: tensor by tensor, clients that are farther away get more attention (Ji et al. 2019)."""

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
    """For each tensor s_k = ‖w − w_k‖, a = softmax(s), w ← w − ε·Σ a_k (w − w_k).

    step_size: ε > 0. The default is the paper's code's 1.2: above 1 the model goes beyond its
    clients. Norms are Frobenius norms, of tensors of any shape; numbers of samples have no effect.
    Large tensors have large distances, and the softmax then gives nearly all attention to one
    client. The paper's noise on the result is omitted: it protects no client.
    """

    step_size: PositiveFloat = 1.2

    needs = frozenset({Statistic.TENSOR_NORMS})
    individual = True
    by_samples = False

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Attention for each parameter, equal weights for buffers."""
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
        """One step of ε."""
        return (
            moved(model, combined, context.buffers, lambda _, __, delta: self.step_size * delta),
            state,
        )


def attention(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """softmax of distances; the largest is subtracted first, so nothing overflows."""
    exponentials = np.exp(distances - distances.max())
    return np.asarray(exponentials / exponentials.sum())
