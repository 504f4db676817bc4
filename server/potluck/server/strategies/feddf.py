"""FedDF: distils the clients' models into their mean, on public data (Lin et al. 2020, Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import PositiveFloat, PositiveInt

from potluck.common.errors import TrainingError
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategy import ServerTraining

if TYPE_CHECKING:  # only the training process needs torch, which is slow to import
    import torch
    from torch import Tensor, nn

_HELD_BACK: Final = 10
"""One of every ten public samples is held out from training, to decide when training stops."""
_AT_ONCE: Final = 1024


@dataclass(frozen=True, kw_only=True)
class FedDF(Averaging):
    """Averages the updates, then trains the mean towards the clients' mean output on public data.

    Starts from FedAvg's mean and minimises KL(softmax of the clients' mean logits ‖ model).

    The coordinator trains with Adam and a cosine learning rate, on public samples without labels.
    steps: maximum number of batches. batch_size: number of public samples per batch. learning_rate:
    initial learning rate. check_every: number of steps between evaluations on held-out samples.
    patience: number of steps without improvement after which training stops; the best model is then
    used. gradient_clip: maximum L2 norm of a step's gradient.

    The paper stops by accuracy on labelled validation data. Here the divergence on a held-out tenth
    of the public samples decides, which needs neither labels nor evaluation data.
    """

    steps: PositiveInt = 10_000
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 0.001
    check_every: PositiveInt = 100
    patience: PositiveInt = 1000
    gradient_clip: PositiveFloat = 5.0

    individual = True
    by_samples = False  # the mean of the clients' logits is unweighted
    trains = True

    def train(self, training: ServerTraining) -> None:
        """Distil the clients' models into their mean, which is the initial network."""
        import torch
        from torch import nn

        from potluck.common.learning.optimizers import Adam

        network, samples = training.network, len(training.inputs)
        student = training.weights()
        beliefs = teacher(training)
        training.load(student)
        order = torch.Generator().manual_seed(training.seed)
        shuffled = torch.randperm(samples, generator=order)
        held_back = max(1, samples // _HELD_BACK)
        checked, taught = shuffled[:held_back], shuffled[held_back:]
        parameters = [each for each in network.parameters() if each.requires_grad]
        optimizer = Adam(parameters, learning_rate=self.learning_rate)
        best, best_at, found = _divergence(network, training.inputs, beliefs, checked), 0, student
        for step, batch in enumerate(_batches(taught, self.batch_size, order), start=1):
            optimizer.learning_rate = self._rate(step - 1)
            network.train()
            optimizer.clear_gradients()
            logits = network(training.inputs[batch])
            torch.autograd.backward(divergence(logits, beliefs[batch]))
            nn.utils.clip_grad_norm_(parameters, self.gradient_clip)
            optimizer.step()
            if step % self.check_every and step < self.steps:
                continue
            training.progress(step / self.steps)
            reached = _divergence(network, training.inputs, beliefs, checked)
            if reached < best:
                best, best_at, found = reached, step, training.weights()
            if step >= self.steps or step - best_at >= self.patience:
                break
        training.load(found)

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step. step: number of the step, from 0."""
        return self.learning_rate * (1.0 + math.cos(math.pi * step / self.steps)) / 2.0


def teacher(training: ServerTraining) -> Tensor:
    """Return the softmax of the updates' mean logits, n × C. Overwrites the network's weights."""
    import torch

    total: Tensor | None = None
    for update in training.updates:
        training.load(update.weights())
        logits = _logits(training.network, training.inputs)
        total = logits if total is None else total + logits
    if total is None:
        raise TrainingError("a distillation needs the model of at least one client")
    return torch.softmax(total / len(training.updates), dim=1).float()


def divergence(logits: Tensor, beliefs: Tensor) -> Tensor:
    """Return KL(beliefs ‖ softmax(logits)), averaged over b samples. Both arguments are b × C."""
    from torch.nn import functional

    return functional.kl_div(functional.log_softmax(logits, 1), beliefs, reduction="batchmean")


def _divergence(network: nn.Module, inputs: Tensor, beliefs: Tensor, positions: Tensor) -> float:
    value = float(divergence(_logits(network, inputs[positions]), beliefs[positions].double()))
    return value if math.isfinite(value) else math.inf


def _logits(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the network's logits, n × C, float64; leave it in evaluation mode."""
    import torch

    network.eval()
    with torch.inference_mode():
        parts = [network(batch).double() for batch in torch.split(inputs, _AT_ONCE)]
    return torch.cat(parts).clone()


def _batches(positions: Tensor, size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield batches endlessly; each pass has a new random order."""
    import torch

    while True:
        yield from torch.split(positions[torch.randperm(len(positions), generator=order)], size)
