"""FedBiO: clients learn weights of their samples together with the model (Li et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import PositiveFloat

from potluck.common.disclosure import Weighting
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategies.server_step import named, unnamed, zeros
from potluck.server.strategy import (
    Combine,
    Correction,
    RoundContext,
    UpdateStatistics,
    Weights,
)

DIRECTION: Final = "direction"
"""Name of the auxiliary tensors u, an estimate that `FedBiO` describes. The coordinator sends the
last round's mean u, and each client returns its own u."""


@dataclass(kw_only=True)
class FedBiO(Averaging):
    """Averages the updates of clients that also learn a weight for each of their samples.

    FedAvg of the model y and of u, an estimate of (∇²_yy g)⁻¹·∇_y f, both weighted by samples.

    g is the clients' training loss, with a weight σ(λ_i) for each sample. f is the loss on samples
    that clients hold out (training.validation_share; 0.2 if unset). A client's λ never leave the
    client; a client's new λ replace its old ones only if its update became part of a committed
    round. Sending u doubles the traffic in both directions. A step needs two more backward passes.

    tau > 0: step size of u. eta > 0: step size of the λ. clip > 0: maximum L2 norm of u.
    """

    tau: PositiveFloat = 0.01
    eta: PositiveFloat = 0.1
    clip: PositiveFloat = 10.0

    auxiliary = frozenset({DIRECTION})
    training: ClassVar[Mapping[str, object]] = {"validation_share": 0.2}

    def __post_init__(self) -> None:
        options = {"tau": self.tau, "eta": self.eta, "clip": self.clip}
        self.correction = Correction(name="fedbio", options=options, keeps=True, descends=True)

    def review(self, training: LocalTraining, weighting: Weighting) -> Sequence[str]:
        """Raise ConfigurationError if clients hold out no samples."""
        if not training.validation_share:
            raise ConfigurationError(
                "strategy fedbio needs samples that clients hold out from training, but "
                "training.validation_share is 0; set it to 0.2, for example",
                strategy="fedbio",
            )
        return super().review(training, weighting)

    def init(self, model: Weights) -> State:
        """Return the state with u = 0."""
        return State(arrays=named(DIRECTION, zeros(model)))

    def broadcast(self, state: State) -> Mapping[str, Weights]:
        """Return u, which all clients receive with the model."""
        return {DIRECTION: unnamed(DIRECTION, state.arrays)}

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the means of the clients' models and of their u, weighted by samples."""
        weights = super().weigh(statistics).weights
        return Combine(weights=weights, auxiliary={DIRECTION: weights})

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the clients' mean model as the next model, and the state with their mean u."""
        following, _ = super().apply(state, model, combined, context)
        return following, State(arrays=named(DIRECTION, context.auxiliary[DIRECTION]))
