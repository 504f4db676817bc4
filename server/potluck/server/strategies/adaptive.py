"""FedAdagrad, FedYogi and FedAdam: adaptive server optimisers (Reddi et al. 2021, Alg. 2).

m ← β1·m + (1 − β1)·Δ with Δ = Σ p_k (w_k − w); each class defines its own v; w ← w + η·m / (√v +
τ). As in the paper, v starts at τ², and this bias is not corrected.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from pydantic import PositiveFloat

from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, Memory
from potluck.server.strategies.server_step import (
    Doubles,
    doubles,
    filled,
    following,
    moved,
    named,
    unnamed,
    zeros,
)
from potluck.server.strategy import Combine, RoundContext, UpdateStatistics, Weights


class _Adaptive(Averaging):
    """Base class with the server step of the three strategies; both moments are stored as
    float32."""

    learning_rate: PositiveFloat
    beta1: Memory
    tau: PositiveFloat

    @abstractmethod
    def _second_moment(self, moment: Doubles, square: Doubles) -> Doubles:
        """Return the next v. moment: the current v. square: Δ². Both are float64."""

    def init(self, model: Weights) -> State:
        """Return the state with m = 0 and v = τ²."""
        first = zeros(model)
        second = {name: filled(array.shape, self.tau**2) for name, array in first.items()}
        return State(arrays=named("first", first) | named("second", second))

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the updates' mean difference from the model, weighted by samples."""
        return replace(super().weigh(statistics), difference=True)

    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the model after one server step, and the state with the next m and v."""
        first, second = unnamed("first", state.arrays), unnamed("second", state.arrays)
        next_first = following(first, context.buffers)
        next_second = following(second, context.buffers)

        def by(name: str, place: slice, delta: Doubles) -> Doubles:
            m = self.beta1 * doubles(first, name, place) + (1 - self.beta1) * delta
            v = self._second_moment(doubles(second, name, place), np.square(delta))
            next_first[name].reshape(-1)[place] = m
            next_second[name].reshape(-1)[place] = v
            return self.learning_rate * m / (np.sqrt(v) + self.tau)

        moved_model = moved(model, combined, context.buffers, by)
        arrays = named("first", next_first) | named("second", next_second)
        return moved_model, State(arrays=arrays)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(_Adaptive):
    """Adapts each weight's step to the sum of all its squared differences.

    v ← v + Δ²: steps shrink as v grows. Δ: mean of the updates' differences from the model.

    learning_rate: η > 0. beta1 in [0, 1): 0, as in the paper, means no momentum. tau > 0: τ, added
    to √v; a larger τ makes the steps less adaptive.
    """

    learning_rate: PositiveFloat = 0.01
    beta1: Memory = 0.0
    tau: PositiveFloat = 1e-3

    def _second_moment(self, moment: Doubles, square: Doubles) -> Doubles:
        return moment + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """Adapts each weight's step to its recent squared differences.

    v ← β2·v + (1 − β2)·Δ²: steps shrink as v grows. Δ: mean of the updates' differences from
    the model.

    learning_rate: η > 0. beta1, beta2 in [0, 1): memory of Δ and of Δ². tau > 0: τ, added to √v; a
    larger τ makes the steps less adaptive.
    """

    learning_rate: PositiveFloat = 0.01
    beta1: Memory = 0.9
    beta2: Memory = 0.99
    tau: PositiveFloat = 1e-3

    def _second_moment(self, moment: Doubles, square: Doubles) -> Doubles:
        return self.beta2 * moment + (1 - self.beta2) * square


class FedYogi(FedAdam):
    """Works as FedAdam, but steps grow again more slowly.

    v ← v − (1 − β2)·Δ²·sign(v − Δ²): v falls more slowly than in FedAdam.

    The options are those of FedAdam.
    """

    def _second_moment(self, moment: Doubles, square: Doubles) -> Doubles:
        return moment - (1 - self.beta2) * square * np.sign(moment - square)
