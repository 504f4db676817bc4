"""FedNova: normalises updates by local steps (Wang et al. 2020, Eq. 5 and §4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveFloat

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, Memory, shares
from potluck.server.strategies.fedavgm import Momentum
from potluck.server.strategy import (
    Combine,
    RoundContext,
    Summation,
    UpdateStatistics,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class FedNova(Averaging):
    """Averages updates per local step, so that more steps don't give a client more weight.

    w ← w − η·τ_eff·Σ p_k d_k with d_k = (w − w_k)/a_k and τ_eff = Σ p_k a_k.

    a_k is the effective number of client k's steps; every client reports its own a_k. For plain
    SGD, it is the number of steps τ. With momentum ρ, it is (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ). A
    proximal term makes it smaller. For Adam, which has no such number, a_k is τ. If all a_k are
    equal, this is FedAvg.

    momentum: β in [0, 1) of the server's step, as in FedAvgM (FedDiverse's experiments use it).
    learning_rate: η > 0. Buffers are averaged by samples.
    """

    momentum: Memory = 0.0
    learning_rate: PositiveFloat = 1.0

    summation = Summation.NORMALIZED

    @property
    def _momentum(self) -> Momentum:
        return Momentum(self.momentum, self.learning_rate)

    def review(self, training: LocalTraining, weighting: Weighting) -> Sequence[str]:
        """Return remarks on differences from the paper.

        Raises ConfigurationError if equal weighting hides the clients' numbers of steps.
        """
        if weighting is Weighting.EQUAL and training.steps is None:
            raise ConfigurationError(
                'strategy fednova and weighting = "equal" are not compatible: FedNova normalises '
                "by the clients' numbers of steps, which would reveal their numbers of samples; "
                "set training.steps, another weighting or another strategy",
                strategy="fednova",
                weighting=weighting.value,
            )
        remarks = []
        if training.adaptive:
            remarks.append(
                f"strategy fednova with optimizer {training.optimizer}: FedNova's effective "
                "number of steps is not known for this optimizer, so clients are normalised by "
                "their number of steps"
            )
        if weighting is not Weighting.EXACT and training.steps is None:
            remarks.append(
                f'strategy fednova with weighting = "{weighting}": clients are normalised by '
                "the number of steps that follows from the disclosed number of samples, not by "
                "the actual number"
            )
        return remarks

    def init(self, model: Weights) -> State:
        """Return the state with a velocity of 0, or an empty state without momentum."""
        return self._momentum.init(model)

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request differences weighted by τ_eff·p_k/a_k; these weights don't sum to 1."""
        p, a = shares(statistics.samples), statistics.normalizers
        return Combine(
            weights=float(np.dot(p, a)) * p / a,
            difference=True,
            tensor_weights=dict.fromkeys(sorted(statistics.buffers), p),
        )

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the model after one server step, and the state with the next velocity."""
        return self._momentum.step(state, model, combined, context)
