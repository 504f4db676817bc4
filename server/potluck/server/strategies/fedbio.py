"""FedBiO: clients train weights of their own samples together with the model (Li et al. 2022)."""

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
"""The auxiliary u: down the mean of the last round, up a client's own."""


@dataclass(kw_only=True)
class FedBiO(Averaging):
    """FedAvg of the model y and of u, an estimate of (∇²_yy g)⁻¹·∇_y f, both by samples.

    g is the clients' loss with a weight σ(λ_i) for each sample, f that on samples that they keep
    back (training.validation_share; 0.2 if the run file names none). A client's λ are its own: it
    keeps them from one round to the next, once its update is part of a committed round, and they
    never leave it. As much as the model travels down and up again, for u. A step costs two
    backward passes more.

    tau > 0: step of u. eta > 0: step of the λ. clip > 0: the longest u, as an L2 norm.
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
        """Raise ConfigurationError if clients keep no samples back."""
        if not training.validation_share:
            raise ConfigurationError(
                "strategy fedbio weighs samples by how the model does on samples that clients keep "
                "back from training, and training.validation_share is 0; set it to 0.2, say",
                strategy="fedbio",
            )
        return super().review(training, weighting)

    def init(self, model: Weights) -> State:
        """u = 0."""
        return State(arrays=named(DIRECTION, zeros(model)))

    def broadcast(self, state: State) -> Mapping[str, Weights]:
        """u."""
        return {DIRECTION: unnamed(DIRECTION, state.arrays)}

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Both by samples."""
        weights = super().weigh(statistics).weights
        return Combine(weights=weights, auxiliary={DIRECTION: weights})

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """The means are the next ones."""
        following, _ = super().apply(state, model, combined, context)
        return following, State(arrays=named(DIRECTION, context.auxiliary[DIRECTION]))
