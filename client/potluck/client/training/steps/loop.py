"""One client's training in one round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.correction import (
    CorrectionContext,
    CorrectionOutcome,
    LocalCorrection,
    NamedAuxiliaries,
    RunningCorrection,
    RunningDescent,
)
from potluck.client.objective import (
    Batch,
    LocalContext,
    Objective,
)
from potluck.common.errors import DataError, DeviceMemoryError, RoundClosedError, TrainingError
from potluck.common.learning.local_steps import normalizer
from potluck.common.learning.optimizers import LocalOptimizer, make_optimizer
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tensors.layout import Layout
from potluck.common.updates.update_report import UpdateReport

# Squared losses -----------------------------------------------------------------------------------

UTILITY = "utility"
"""Name, in a report, of the number that `utility` returns."""


class SquaredLosses:
    """The root mean square of cross-entropy over the samples of a training's first pass.

    Each sample's loss is measured before the step that uses the sample. Oort's statistical utility
    of a client follows from this value, without another pass over the samples. Costs one softmax
    per step of the first pass; does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._samples = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. logits: b × C. labels: b, int64."""
        with torch.no_grad():
            losses = functional.cross_entropy(logits.detach(), labels, reduction="none")
            self._sum += losses.double().square().sum()
        self._samples += len(labels)

    def root_mean_square(self) -> float:
        """Return the root mean square; NaN before the first sample. Waits for the device."""
        return (float(self._sum) / self._samples) ** 0.5 if self._samples else float("nan")


def utility(samples: int, root_mean_square: float) -> float:
    """Return |B| · √(mean squared loss). samples: |B|, the disclosed number of samples."""
    return samples * root_mean_square


# The loop -----------------------------------------------------------------------------------------

_PREDICTED_AT_ONCE = 256
_REPORTS = 50
"""Maximum number of progress reports per training: enough for a smooth bar, at little cost."""


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """Inputs of a training in addition to model, data, objective and settings.

    classes: number of the task's classes. round: number of the round, from 1. progress: called now
    and then with the share done, in [0, 1]. cancelled: called before every step. Both must return
    at once.
    """

    classes: int
    seed: int
    round: int
    device: torch.device
    progress: Callable[[float], None] = lambda _: None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class TrainingResult(UpdateReport):
    """The result of a training; not all of it is disclosed.

    seconds: wall-clock time. correction: the tensors that the strategy's correction sends, and
    those it keeps on the client. root_mean_square_loss: value for the first pass, if it was
    measured.
    """

    loss: float = math.nan
    normalizer: float = math.nan
    correction: CorrectionOutcome | None = None
    root_mean_square_loss: float | None = None


def train(
    model: nn.Module,
    data: Examples,
    objective: Objective,
    settings: LocalTraining,
    context: TrainingContext,
    *,
    corrected: Corrected | None = None,
    optimizer: LocalOptimizer | None = None,
    measures_losses: bool = False,
    received: tuple[Tensor, ...] | None = None,
) -> TrainingResult:
    """Train `model` in place, from the weights it holds, and leave it on the context's device.

    `corrected`: the strategy's correction of the steps. `optimizer`: an optimiser to reuse, made
    for this model and these settings; it is restarted. `measures_losses`: True to sum up the losses
    of the first pass. `received`: the trainable tensors from the coordinator, on the device, if
    training starts from other weights; the objective may use them. The same weights, data,
    settings, seed, device and number of threads give the same result, bit for bit (on a GPU as far
    as the kernels that torch chooses allow). The device's global generator is seeded, and restored
    afterwards, so only one training at a time may run on a device.

    Raises TrainingError if there is nothing to train on, the model fails or diverges, and
    RoundClosedError if cancelled.
    """
    if len(data) == 0:
        raise no_samples()
    started, device, number = time.monotonic(), context.device, context.round
    losses = SquaredLosses(device) if measures_losses else None
    with _explained(device, settings), _seeded(device, context.seed):
        model.to(device).train()
        optimizer = _restarted(optimizer, model, settings, number)
        # The correction may set other weights, which are then those that the objective starts from.
        correction = None if corrected is None else corrected.begin(model, settings, context)
        loop = _Loop(model, data.to(device), objective, settings, context, optimizer, received)
        loop.losses, loop.correction = losses, correction
        loop.descent = correction if isinstance(correction, RunningDescent) else None
        try:
            loss = loop.run()
        finally:
            optimizer.release()  # free its memory; the optimiser is reused in the next training
        amount = normalizer(settings, loop.taken, round_number=number, mu=objective.proximal)
        outcome = None if correction is None else correction.finish(amount)
    return TrainingResult(
        samples=len(data),
        steps=loop.taken,
        normalizer=amount,
        seconds=time.monotonic() - started,
        loss=loss,
        correction=outcome,
        root_mean_square_loss=None if losses is None else losses.root_mean_square(),
    )


def no_samples() -> DataError:
    """Return the error for a client without training samples."""
    return DataError("the client has no training samples; remove the client from the federation")


@contextmanager
def _explained(device: torch.device, settings: LocalTraining) -> Iterator[None]:
    """Turn the errors that torch raises in the block into a TrainingError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{device} has too little memory for this model with batches of {settings.batch_size}; "
            "lower training.batch_size, set training.smallest_batch_size so that clients may halve "
            "it, or use another device",
            device=device,
        ) from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(str(error).split())
        raise TrainingError(
            f"the task's model or the objective failed: {text}; check that the task's model, "
            "inputs and labels are compatible"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A correction with its received auxiliaries, on the CPU, by name and tensor.

    layout: layout of the tensors that are sent; steps of the other tensors are not corrected.
    samples, positions, validation: as in `CorrectionContext`.
    """

    correction: LocalCorrection
    shared: NamedAuxiliaries
    personal: NamedAuxiliaries
    kept: NamedAuxiliaries | None
    layout: Layout
    samples: int = 0
    positions: Tensor | None = None
    validation: Examples | None = None

    def begin(
        self, model: nn.Module, settings: LocalTraining, training: TrainingContext
    ) -> RunningCorrection:
        """Start the correction, before the first step of a training."""
        device = training.device

        def there(auxiliaries: NamedAuxiliaries) -> NamedAuxiliaries:
            return {
                name: {tensor: value.to(device) for tensor, value in tensors.items()}
                for name, tensors in auxiliaries.items()
            }

        return self.correction.begin(
            CorrectionContext(
                parameters={
                    name: tensor
                    for name, tensor in trainable(model).items()
                    if name in self.layout.by_name
                },
                shared=there(self.shared),
                personal=there(self.personal),
                kept=None if self.kept is None else there(self.kept),
                settings=settings,
                round=training.round,
                seed=training.seed,
                samples=self.samples,
                positions=None if self.positions is None else self.positions.to(device),
                validation=None if self.validation is None else self.validation.to(device),
            )
        )


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that training changes, by name."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def _restarted(
    optimizer: LocalOptimizer | None, model: nn.Module, settings: LocalTraining, round_number: int
) -> LocalOptimizer:
    if optimizer is None:
        return make_optimizer(tuple(trainable(model).values()), settings, round_number=round_number)
    optimizer.restart(settings.learning_rate_in(round_number))
    return optimizer


class _Loop:
    """The steps of one training."""

    def __init__(
        self,
        model: nn.Module,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        context: TrainingContext,
        optimizer: LocalOptimizer,
        received: tuple[Tensor, ...] | None = None,
    ) -> None:
        self.model, self.data, self.objective, self.settings = model, data, objective, settings
        self.context, self.optimizer = context, optimizer
        self.correction: RunningCorrection | None = None
        self.descent: RunningDescent | None = None
        self.losses: SquaredLosses | None = None
        self.taken = 0
        parameters = tuple(trainable(model).values())
        if received is None and objective.needs_received:
            received = tuple(tensor.detach().clone() for tensor in parameters)
        self.local = LocalContext(
            round=context.round,
            label_counts=torch.bincount(data.labels, minlength=context.classes),
            parameters=parameters,
            received=received or (),
            predictions=predicted(model, data) if objective.needs_predictions else None,
        )
        self.half_precision = settings.precision == "bfloat16" and data.labels.is_cuda

    def run(self) -> float:
        """Take all steps; returns the mean loss over the last pass."""
        progress, cancelled = self.context.progress, self.context.cancelled
        order = torch.Generator().manual_seed(self.context.seed)
        samples, size = len(self.data), self.settings.batch_size
        planned = self.settings.planned_steps(samples)
        report_every = max(1, planned // _REPORTS)
        device = self.data.labels.device
        epoch, loss = 0, 0.0
        while self.taken < planned:
            epoch += 1
            permutation = torch.randperm(samples, generator=order).to(device)
            batches = torch.split(permutation, size)[: planned - self.taken]
            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            for indices in batches:
                if cancelled():
                    raise RoundClosedError(
                        "the training was cancelled, because no run waits for it"
                    )
                loss_sum.add_(self.step(indices), alpha=len(indices))
                self.taken += 1
                if self.taken % report_every == 0:
                    progress(self.taken / planned)
            loss = float(loss_sum) / min(samples, len(batches) * size)  # waits for the device
            self._require_finite(loss_sum, epoch)
            self.losses = None  # measure the first pass only
        progress(1.0)
        return loss

    def step(self, indices: Tensor) -> Tensor:
        """Take one optimiser step; return the batch's loss, still on the device."""
        batch = Batch(
            inputs=self.data.inputs_at(indices),
            labels=self.data.labels.index_select(0, indices),
            indices=indices,
        )
        self.optimizer.clear_gradients()
        if self.descent is not None:
            loss, logits = self.descent.descend(self.model, batch)
        else:
            logits = self.logits(batch.inputs)
            loss = self.objective.loss(logits, batch, self.local)
            torch.autograd.backward(loss)
        if self.losses is not None:
            self.losses.add(logits, batch.labels)
        if self.settings.gradient_clip is not None:
            nn.utils.clip_grad_norm_(self.local.parameters, self.settings.gradient_clip)
        if self.correction is not None:
            self.correction.correct()
        self.optimizer.step()
        return loss.detach()

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the model's output as float32."""
        if not self.half_precision:
            logits: Tensor = self.model(inputs)
            return logits
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(inputs)
        return logits.float()

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


def predicted(model: nn.Module, data: Examples) -> Tensor:
    """Return every sample's probabilities, n × C, on the data's device.

    Leaves the model in its training or evaluation mode.
    """
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        positions = torch.arange(len(data), device=data.labels.device)
        parts = [
            functional.softmax(model(data.inputs_at(batch)).float(), dim=1)
            for batch in torch.split(positions, _PREDICTED_AT_ONCE)
        ]
    model.train(was_training)
    # Clone outside inference mode: autograd can't save tensors made in it.
    return torch.cat(parts).clone()


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's global generator, used by dropout, in the block; then restore it."""
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
