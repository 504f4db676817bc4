"""FLTrust: trusts an update as far as it agrees with an update that the coordinator trains itself
(Cao et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveFloat, PositiveInt

from potluck.common.errors import TrainingError
from potluck.server.state import State
from potluck.server.strategies.averaging import Averaging, Memory, equal_shares
from potluck.server.strategy import (
    Combine,
    RoundContext,
    ServerTraining,
    UpdateStatistics,
    Weights,
)

if TYPE_CHECKING:  # only the training process needs torch, which is slow to import
    from torch import Tensor, nn

Doubles = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FLTrust(Averaging):
    """Trains on a few trusted samples, and weights each update by its cosine with the result.

    g_0 is the coordinator's own update, from the round's model on the task's public samples. The
    trust in update g_i is ReLU(cos(g_i, g_0)), and w ← w + α · Σ trust_i · (‖g_0‖ / ‖g_i‖) · g_i /
    Σ trust_i. If the trust in all updates is 0, the model does not change.

    step_size: α. epochs, batch_size, learning_rate, momentum: settings of the coordinator's
    training with SGD. They determine ‖g_0‖, the length of a step, and should be those of the
    clients. Running statistics are averaged by trust. Numbers of samples have no effect.
    """

    step_size: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 0.05
    momentum: Memory = 0.0

    individual = True
    by_samples = False
    trains = True
    needs_labels = True

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request a mean; only its integer tensors are used."""
        return Combine(weights=equal_shares(len(statistics.clients)))

    def apply(
        self,
        state: State,
        model: Weights,
        combined: Weights,
        context: RoundContext,  # noqa: ARG002  part of the interface
    ) -> tuple[Weights, State]:
        """Return the round's model, from which the coordinator trains."""
        kept = {
            name: array if array.dtype.kind == "f" else combined[name]
            for name, array in model.items()
        }
        return kept, state

    def train(self, training: ServerTraining) -> None:
        """Train the coordinator's own update; then set the network to the model moved by the
        clients' updates, weighted by trust."""
        before = training.weights()
        parameters = {name for name, _ in training.network.named_parameters()} & before.keys()
        self._descend(training)
        trained = training.weights()
        own = {name: trained[name].astype(np.float64) - before[name] for name in parameters}
        length = math.sqrt(sum(float(np.square(part).sum()) for part in own.values()))
        if not math.isfinite(length):
            raise TrainingError(
                "the coordinator's training diverged; lower learning_rate of strategy fltrust"
            )
        trust, lengths = _compared(training, before, own, length)
        following: dict[str, NDArray[Any]] = dict(before)
        total = trust.sum()
        if total > 0:
            shares = trust / total
            factors = np.where(trust > 0, shares / np.where(lengths > 0, lengths, 1.0), 0.0)
            for name, array in before.items():
                if array.dtype.kind != "f":
                    continue
                scale = self.step_size * length * factors if name in parameters else shares
                step = np.zeros(array.shape)
                for update, factor in zip(training.updates, scale.tolist(), strict=True):
                    if factor:
                        step += factor * (update.tensor(name).astype(np.float64) - array)
                following[name] = (array + step).astype(array.dtype)
        training.load(following)

    def _descend(self, training: ServerTraining) -> None:
        """Train the network on the public samples."""
        import torch
        from torch.nn import functional

        from potluck.common.learning.optimizers import StochasticGradientDescent

        network, labels = training.network, _labels(training)
        order = torch.Generator().manual_seed(training.seed)
        optimizer = StochasticGradientDescent(
            _trainable(network), learning_rate=self.learning_rate, momentum=self.momentum
        )
        network.train()
        for epoch in range(self.epochs):
            shuffled = torch.randperm(len(labels), generator=order)
            for batch in torch.split(shuffled, self.batch_size):
                optimizer.clear_gradients()
                loss = functional.cross_entropy(network(training.inputs[batch]), labels[batch])
                torch.autograd.backward(loss)
                optimizer.step()
            training.progress((epoch + 1) / self.epochs)


def _compared(
    training: ServerTraining, before: Weights, own: Mapping[str, Doubles], length: float
) -> tuple[Doubles, Doubles]:
    """Return the trust in each update, in [0, 1], and the update's L2 norm. own: the coordinator's
    own update. length: norm of `own`."""
    products, squares = np.zeros(len(training.updates)), np.zeros(len(training.updates))
    for place, update in enumerate(training.updates):
        for name, part in own.items():
            difference = update.tensor(name).astype(np.float64) - before[name]
            products[place] += float((difference * part).sum())
            squares[place] += float(np.square(difference).sum())
    lengths = np.sqrt(squares)
    both = lengths * length
    cosines = np.divide(products, both, out=np.zeros(len(both)), where=both > 0)
    return np.clip(cosines, 0.0, 1.0), lengths


def _labels(training: ServerTraining) -> Tensor:
    if training.labels is None or len(training.labels) != len(training.inputs):
        raise TrainingError("strategy fltrust needs one label for each public sample")
    return training.labels


def _trainable(network: nn.Module) -> list[nn.Parameter]:
    return [each for each in network.parameters() if each.requires_grad]
