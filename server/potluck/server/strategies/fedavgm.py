"""FedAvgM: a server step with momentum (Hsu et al. 2019, §4.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import PositiveFloat

from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, Memory
from potluck.server.strategies.server_step import (
    Doubles,
    doubles,
    following,
    moved,
    named,
    unnamed,
    zeros,
)
from potluck.server.strategy import Combine, RoundContext, UpdateStatistics, Weights


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Averaging):
    """Averages the updates, and moves the model by the mean with momentum.

    v ← β·v + Δ, w ← w + η·v with Δ = Σ p_k (w_k − w).

    momentum: β in [0, 1); a constant Δ is amplified up to 1/(1 − β) times, 20 times at 0.95.
    learning_rate: η > 0. nesterov: True to step by β·v + Δ, as in the paper; False to step by v
    (heavy ball). The velocity v is stored as float32. A round without updates changes neither the
    model nor v.
    """

    momentum: Memory = 0.95
    learning_rate: PositiveFloat = 1.0
    nesterov: bool = False

    @property
    def _momentum(self) -> Momentum:
        return Momentum(self.momentum, self.learning_rate, nesterov=self.nesterov)

    def init(self, model: Weights) -> State:
        """Return the state with a velocity of 0, or an empty state if momentum β is 0."""
        return self._momentum.init(model)

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the updates' mean difference from the model, weighted by samples."""
        return replace(super().weigh(statistics), difference=True)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the model after one server step, and the state with the next velocity."""
        return self._momentum.step(state, model, combined, context)


class Momentum:
    """A server step with heavy-ball or Nesterov momentum on model differences."""

    def __init__(self, beta: float, rate: float, *, nesterov: bool = False) -> None:
        self._beta, self._rate, self._nesterov = beta, rate, nesterov

    def init(self, model: Weights) -> State:
        """Return the state with a velocity of 0, or an empty state if β is 0."""
        return State(arrays=named("velocity", zeros(model)) if self._beta else {})

    def step(
        self, state: State, model: Weights, difference: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the next model, and the state with the next velocity."""
        velocity = unnamed("velocity", state.arrays)
        next_velocity = following(velocity, context.buffers)

        def by(name: str, place: slice, delta: Doubles) -> Doubles:
            if not self._beta:
                return self._rate * delta
            speed = self._beta * doubles(velocity, name, place) + delta
            next_velocity[name].reshape(-1)[place] = speed
            return self._rate * (self._beta * speed + delta if self._nesterov else speed)

        model = moved(model, difference, context.buffers, by)
        return model, State(scalars=state.scalars, arrays=named("velocity", next_velocity))
