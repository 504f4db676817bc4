"""Optimisers of local training.

`torch.optim.Optimizer` objects import torch's compiler when the first one is made, which takes
every host process seconds before its first step; the functions beneath them do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd


class StochasticGradientDescent:
    """SGD with heavy-ball momentum and L2 penalty, as `torch.optim.SGD`; new for each training."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        learning_rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.learning_rate = learning_rate
        self._parameters = parameters
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._buffers: dict[int, Tensor | None] = {}

    def clear_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        """Move the parameters that have a gradient."""
        moving = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        buffers = [self._buffers.get(id(parameter)) for parameter in moving]
        sgd(
            [parameter.data for parameter in moving],
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
        for parameter, buffer in zip(moving, buffers, strict=True):
            self._buffers[id(parameter)] = buffer
