"""Optimisers of training on hosts and on the coordinator.

The first `torch.optim.Optimizer` object in a process imports torch's compiler, which takes seconds.
The functions behind torch's optimisers don't import it. So the optimisers here call these functions
directly. A step is as fast as with `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from potluck.common.settings.local_training import LocalTraining


class LocalOptimizer(Protocol):
    """Updates parameters from their gradients."""

    learning_rate: float

    def restart(self, learning_rate: float) -> None:
        """Reset all state for a new training."""
        ...

    def clear_gradients(self) -> None:
        """Forget the gradients of the last step."""
        ...

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        ...

    def release(self) -> None:
        """Free the memory of all state; call `restart` before the next step."""
        ...


class _Optimizer:
    """Base class: holds the parameters and finds those with a gradient."""

    def __init__(self, parameters: Sequence[Tensor], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._parameters = parameters

    def clear_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self._parameters:
            parameter.grad = None

    def release(self) -> None:
        """Free the memory of all state; call `restart` before the next step."""
        self.clear_gradients()
        self._forget()

    def _forget(self) -> None:
        """Drop the state that a step keeps for the next, such as the momentum."""
        raise NotImplementedError

    def _moving(self) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Return positions, values and gradients of the parameters that have a gradient."""
        places: list[int] = []
        values: list[Tensor] = []
        gradients: list[Tensor] = []
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                places.append(place)
                values.append(parameter.data)
                gradients.append(parameter.grad)
        return places, values, gradients


class StochasticGradientDescent(_Optimizer):
    """SGD with heavy-ball momentum and L2 penalty, as `torch.optim.SGD`."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, learning_rate)
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._buffers: list[Tensor | None] = [None] * len(parameters)

    def restart(self, learning_rate: float) -> None:
        """Forget the momentum."""
        self.learning_rate = learning_rate
        self._forget()

    def _forget(self) -> None:
        self._buffers = [None] * len(self._parameters)

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        places, values, gradients = self._moving()
        buffers = [self._buffers[place] for place in places]
        sgd(
            values,
            gradients,
            buffers,
            weight_decay=self._weight_decay,
            momentum=self._momentum,
            lr=self.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            foreach=True,
        )
        if self._momentum:
            for place, buffer in zip(places, buffers, strict=True):
                self._buffers[place] = buffer


class Adam(_Optimizer):
    """Adam, or AdamW with `decoupled` decay, as `torch.optim.Adam` and `AdamW`."""

    _first: list[Tensor]
    _second: list[Tensor]
    _steps: list[Tensor]

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        super().__init__(parameters, learning_rate)
        self._betas, self._epsilon = betas, epsilon
        self._weight_decay, self._decoupled = weight_decay, decoupled
        self._forget()
        self.restart(learning_rate)

    def restart(self, learning_rate: float) -> None:
        """Forget both moments."""
        self.learning_rate = learning_rate
        self._forget()  # frees the memory before the same amount is allocated again
        self._first = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._second = [torch.zeros_like(parameter) for parameter in self._parameters]
        # Step counts stay on the CPU, as in torch, since the step function reads them there.
        self._steps = [torch.zeros((), dtype=torch.float32) for _ in self._parameters]

    def _forget(self) -> None:
        self._first, self._second, self._steps = [], [], []

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        places, values, gradients = self._moving()
        function = adamw if self._decoupled else adam
        with torch.no_grad():
            function(
                values,
                gradients,
                [self._first[place] for place in places],
                [self._second[place] for place in places],
                [],
                [self._steps[place] for place in places],
                foreach=True,
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=self.learning_rate,
                weight_decay=self._weight_decay,
                eps=self._epsilon,
                maximize=False,
            )


def make_optimizer(
    parameters: Sequence[Tensor], settings: LocalTraining, *, round_number: int
) -> LocalOptimizer:
    """Make the optimiser that the settings name, with the round's learning rate."""
    rate = settings.learning_rate_in(round_number)
    if settings.optimizer == "sgd":
        return StochasticGradientDescent(
            parameters,
            learning_rate=rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
    return Adam(
        parameters,
        learning_rate=rate,
        betas=settings.betas,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
        decoupled=settings.optimizer == "adamw",
    )
