"""One client's training in one round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.optimizers import StochasticGradientDescent
from potluck.common.errors import RoundClosedError, TrainingError
from potluck.common.task import Examples
from potluck.common.training import LocalTraining

_REPORTS = 50
"""Progress reports per training: enough for a smooth bar, too few to cost anything."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What came of a training. loss: mean over the last pass. seconds: of wall-clock time."""

    samples: int
    steps: int
    seconds: float
    loss: float


def train(
    model: nn.Module,
    data: Examples,
    objective: Objective,
    settings: LocalTraining,
    *,
    classes: int,
    seed: int,
    round_number: int,
    device: torch.device,
    progress: Callable[[float], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Trains `model` in place, from the weights it holds, and leaves it on `device`.

    Same weights, data, settings, seed, device and number of threads: the same weights come out,
    bit for bit (on a GPU as far as the kernels that torch chooses allow). `progress` gets shares
    in [0, 1] now and then; `cancelled` is asked before every step. Both must return at once. The
    global generator of `device` is used and put back, so only one training at a time may run on a
    device.

    Raises TrainingError if there is nothing to train on, the model fails or diverges, and
    RoundClosedError if cancelled.
    """
    if len(data) == 0:
        raise TrainingError("the client has no training samples; remove it from this federation")
    started = time.monotonic()
    try:
        with _seeded(device, seed):
            model.to(device).train()
            loop = _Loop(model, data.to(device), objective, settings, classes, round_number)
            order = torch.Generator().manual_seed(seed)
            loss = loop.run(order, progress, cancelled)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{device} has too little memory for this model with batches of {settings.batch_size}; "
            "lower training.batch_size, or use another device",
            device=device,
        ) from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        raise TrainingError(
            f"the task's model or the objective failed: {text}; see that the task's model, inputs "
            "and labels fit together"
        ) from error
    return TrainingResult(
        samples=len(data),
        steps=settings.planned_steps(len(data)),
        seconds=time.monotonic() - started,
        loss=loss,
    )


class _Loop:
    """The steps of one training."""

    def __init__(
        self,
        model: nn.Module,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        classes: int,
        round_number: int,
    ) -> None:
        self.model, self.data, self.objective, self.settings = model, data, objective, settings
        parameters = tuple(tensor for tensor in model.parameters() if tensor.requires_grad)
        received: tuple[Tensor, ...] = ()
        if objective.needs_received:
            received = tuple(tensor.detach().clone() for tensor in parameters)
        self.local = LocalContext(
            round=round_number,
            label_counts=torch.bincount(data.labels, minlength=classes),
            parameters=parameters,
            received=received,
        )
        self.optimizer = StochasticGradientDescent(
            parameters,
            learning_rate=settings.learning_rate_in(round_number),
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )

    def run(
        self,
        order: torch.Generator,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
    ) -> float:
        """Takes all steps and returns the mean loss over the last pass."""
        samples, size = len(self.data), self.settings.batch_size
        planned = self.settings.planned_steps(samples)
        report_every = max(1, planned // _REPORTS)
        device = self.data.labels.device
        taken, epoch, loss = 0, 0, 0.0
        while taken < planned:
            epoch += 1
            permutation = torch.randperm(samples, generator=order).to(device)
            batches = torch.split(permutation, size)[: planned - taken]
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            for indices in batches:
                if cancelled():
                    raise RoundClosedError("the training was cancelled; nobody waits for it")
                loss_sum.add_(self.step(indices), alpha=len(indices))
                taken += 1
                if taken % report_every == 0:
                    progress(taken / planned)
            loss = float(loss_sum) / min(samples, len(batches) * size)  # waits for the device
            self._require_finite(loss_sum, epoch)
        progress(1.0)
        return loss

    def step(self, indices: Tensor) -> Tensor:
        """One optimiser step; returns the batch's loss, still on the device."""
        batch = Batch(
            inputs=self.data.inputs_at(indices),
            labels=self.data.labels.index_select(0, indices),
            indices=indices,
        )
        self.optimizer.clear_gradients()
        loss = self.objective.loss(self.model(batch.inputs), batch, self.local)
        torch.autograd.backward(loss)
        if self.settings.gradient_clip is not None:
            nn.utils.clip_grad_norm_(self.local.parameters, self.settings.gradient_clip)
        self.optimizer.step()
        return loss.detach()

    def _require_finite(self, loss_sum: Tensor, epoch: int) -> None:
        sums = torch.stack([loss_sum, *(tensor.sum().double() for tensor in self.local.parameters)])
        if not bool(sums.isfinite().all()):
            rate = self.optimizer.learning_rate
            raise TrainingError(
                f"training diverged in epoch {epoch}: loss or weights are NaN or infinite at "
                f"learning rate {rate:g}; lower training.learning_rate or set "
                "training.gradient_clip",
                epoch=epoch,
                learning_rate=rate,
            )


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the generator that dropout and the like draw from on `device`; puts it back after."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
