"""FedNova: clients that take more steps don't pull more (Wang et al. 2020, Eq. 5 and §4.2)."""

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
    """w ← w − η·τ_eff·Σ p_k d_k with d_k = (w − w_k)/a_k and τ_eff = Σ p_k a_k.

    a_k is what client k's steps amount to, and every client reports it: the number of steps τ of
    plain SGD, (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) with momentum ρ, less with a proximal term. Adam has
    no such number: its a_k is τ. Where all are equal, this is FedAvg.

    momentum: β in [0, 1) of the server's step, as FedAvgM's (FedDiverse's experiments have it);
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
                'strategy fednova and weighting = "equal" don\'t go together: it normalises by the '
                "clients' numbers of steps, which would tell their numbers of samples; set "
                "training.steps, another weighting or another strategy",
                strategy="fednova",
                weighting=weighting.value,
            )
        remarks = []
        if training.adaptive:
            remarks.append(
                f"strategy fednova with optimizer {training.optimizer}: what such steps amount to "
                "is not known, so clients are normalised by their number of steps"
            )
        if weighting is not Weighting.EXACT and training.steps is None:
            remarks.append(
                f'strategy fednova with weighting = "{weighting}": clients are normalised by the '
                "steps that the samples they tell would take, not by those they took"
            )
        return remarks

    def init(self, model: Weights) -> State:
        """No velocity."""
        return self._momentum.init(model)

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """τ_eff·p_k/a_k for differences; their sum is not 1."""
        p, a = shares(statistics.samples), statistics.normalizers
        return Combine(
            weights=float(np.dot(p, a)) * p / a,
            difference=True,
            tensor_weights=dict.fromkeys(sorted(statistics.buffers), p),
        )

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """One step of the server."""
        return self._momentum.step(state, model, combined, context)
