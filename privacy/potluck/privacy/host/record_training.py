"""DP-SGD in the built-in loop: clips each record's gradient and adds noise, with Opacus.

Each step draws a Poisson sample of the client's records, clips each record's gradient to an L2
norm, adds Gaussian noise to the sum, and divides by the expected batch size, which is public.
Everything after that only processes noisy gradients: momentum, Adam, weight decay, the proximal
term, SCAFFOLD's control variates.

The generators of batches and noise get their seeds from the operating system, never from the run's
seed, which the coordinator knows. They are torch's generators, which are not cryptographic.
"""

from __future__ import annotations

import math
import secrets
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from potluck.client.correction import LocalCorrection, RunningCorrection
from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.private_training import GrantedTraining, PrivateLoop
from potluck.client.training.steps.loop import (
    Corrected,
    TrainingContext,
    TrainingResult,
    trainable,
)
from potluck.common.errors import (
    ConfigurationError,
    DeviceMemoryError,
    RoundClosedError,
    TrainingError,
)
from potluck.common.learning.local_steps import normalizer
from potluck.common.learning.optimizers import make_optimizer
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.trainer import PrivateTraining
from potluck.privacy.host.noisy_steps import (
    ClippingOptimizer,
    NoisyOptimizer,
    PoissonBatches,
    noisy_steps,
    with_record_gradients,
)


class RecordTraining(PrivateLoop):
    """Trains so that the update hides each single record."""

    def check(
        self,
        model: nn.Module,
        objective: Objective,
        settings: LocalTraining,
        correction: LocalCorrection | None = None,
    ) -> None:
        """Raise ConfigurationError if noise can't hide single records in this training."""
        if settings.unfit_for_noise:
            raise ConfigurationError(settings.unfit_for_noise)
        if not objective.per_sample:
            raise ConfigurationError(
                "the objective is not compatible with [privacy], because the loss of a record "
                "depends on other records; choose cross-entropy, focal, "
                "generalized-cross-entropy, symmetric-cross-entropy or fedprox"
            )
        if correction is not None and not correction.of_gradients:
            raise ConfigurationError(
                f"the correction {type(correction).__name__} is not compatible with [privacy], "
                "because the correction uses records without noise; choose fedavg, fedavgm, "
                "fedadam or scaffold"
            )
        self.check_model(model)

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigurationError if a layer of the model mixes the records of a batch, or if
        weights have fewer than 32 bits, which round too much of the clip and the noise."""
        model.train()
        for name, each in model.named_parameters():
            if each.requires_grad and torch.finfo(each.dtype).bits < 32:
                raise ConfigurationError(
                    f"the model is not compatible with [privacy]: weight '{name}' is "
                    f"{each.dtype}; use float32, or remove [privacy]"
                )
        errors = ModuleValidator.validate(model)
        if errors:
            text = " ".join(str(errors[0]).split())
            raise ConfigurationError(
                f"the model is not compatible with [privacy]: {text[:300]}; replace batch "
                "normalisation by group normalisation (resnet18-gn), or remove [privacy]"
            )

    def noisy_steps(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, terms: PrivateTraining
    ) -> AbstractContextManager[tuple[NoisyOptimizer, PoissonBatches]]:
        """Yield an optimizer with noise and Poisson batches, for a trainer's own loop."""
        return noisy_steps(model, optimizer, data, terms)

    def train(
        self,
        model: nn.Module,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        context: TrainingContext,
        granted: GrantedTraining,
        corrected: Corrected | None = None,
    ) -> TrainingResult:
        """Train the model in place, starting from its current weights. Report no loss."""
        started, device = time.monotonic(), context.device
        model.to(device).train()
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        data = data.to(device)
        with with_record_gradients(model) as network:
            # The correction may set other weights, which are then those that training starts from.
            running = None if corrected is None else corrected.begin(model, settings, context)
            steps = _NoisySteps(network, data, objective, settings, context, granted)
            steps.correction = running
            steps.run()
        amount = normalizer(
            settings, granted.steps, round_number=context.round, mu=objective.proximal
        )
        correction = None if running is None else running.finish(amount)
        with torch.no_grad():
            for name, each in model.named_buffers():
                each.copy_(buffers[name])  # restore: forward passes wrote buffers without noise
        _require_finite(model, settings, context.round)
        return TrainingResult(
            samples=len(data),
            steps=granted.steps,
            normalizer=amount,
            seconds=time.monotonic() - started,
            loss=math.nan,
            correction=correction,
        )


class _NoisySteps:
    """Takes the noisy steps of one training."""

    def __init__(
        self,
        network: GradSampleModule,
        data: Examples,
        objective: Objective,
        settings: LocalTraining,
        context: TrainingContext,
        granted: GrantedTraining,
    ) -> None:
        self.network, self.data, self.objective = network, data, objective
        self.settings, self.context, self.granted = settings, context, granted
        self.correction: RunningCorrection | None = None
        device = context.device
        self.batches = torch.Generator().manual_seed(secrets.randbits(63))
        self.parameters: tuple[Any, ...] = tuple(trainable(network).values())
        self.local = LocalContext(
            round=context.round,
            label_counts=torch.zeros(context.classes, dtype=torch.int64, device=device),
            parameters=self.parameters,
            received=tuple(each.detach().clone() for each in self.parameters),
        )
        self._try_without_data()
        used = [each for each in self.parameters if each.grad_sample is not None]
        self.noise = ClippingOptimizer(
            torch.optim.SGD(used, lr=1.0),  # only holds the parameters; never steps
            noise_multiplier=granted.noise_multiplier,
            clip=granted.clip,
            expected_batch=granted.expected_batch,
            generator=torch.Generator(device).manual_seed(secrets.randbits(63)),
        )
        self.optimizer = make_optimizer(self.parameters, settings, round_number=context.round)

    def run(self) -> None:
        """Take all steps."""
        progress, cancelled = self.context.progress, self.context.cancelled
        for taken in range(self.granted.steps):
            if cancelled():
                raise RoundClosedError(
                    "the training was cancelled, because no run waits for its update"
                )
            self._step()
            progress((taken + 1) / self.granted.steps)

    def _step(self) -> None:
        drawn = torch.rand(len(self.data), generator=self.batches, dtype=torch.float64)
        chosen = (drawn < self.granted.sampling_rate).nonzero()[:, 0].to(self.context.device)
        self.noise.zero_grad(set_to_none=True)
        # Leave room: a sample is often a little larger than the mean, and a second pass is slow.
        for part in torch.split(chosen, self.settings.batch_size * 5 // 4 + 1):
            self._add(part)
        for each in self.noise.trained:  # add noise even if no record was drawn
            each.grad_sample = each.new_zeros((0, *each.shape))
        self.noise.pre_step()
        if self.objective.proximal:
            for now, then in zip(self.parameters, self.local.received, strict=True):
                if now.grad is not None:
                    now.grad.add_(now.detach() - then, alpha=self.objective.proximal)
        if self.settings.gradient_clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.settings.gradient_clip)
        if self.correction is not None:
            self.correction.correct()
        self.optimizer.step()

    def _add(self, indices: Tensor) -> None:
        """Add the clipped gradients of some records to the step's sum.

        A record adds nothing if the model fails on it or its gradient is not finite: a failure of
        the training would reveal that the record is among the data. Other records are not
        affected."""
        if len(indices) == 0:
            return
        try:
            self._compute_gradients(
                Batch(
                    inputs=self.data.inputs_at(indices),
                    labels=self.data.labels.index_select(0, indices),
                    indices=indices,
                )
            )
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{self.context.device} has too little memory for the gradients of "
                f"{self.settings.batch_size} single records; lower training.batch_size, or set "
                "training.smallest_batch_size",
                device=self.context.device,
            ) from error
        except Exception:
            self._forget_failed_pass()
            half = len(indices) // 2
            if half:
                self._add(indices[:half])
                self._add(indices[half:])
            return
        self.noise.signal_skip_step(do_skip=True)
        self.noise.pre_step()
        self.noise.zero_grad(set_to_none=True)

    def _compute_gradients(self, batch: Batch) -> None:
        """Set `grad_sample` of each parameter."""
        for each in self.parameters:
            each.grad_sample = None
        loss = self.objective.loss(self.network(batch.inputs), batch, self.local)
        torch.autograd.backward(loss)

    def _forget_failed_pass(self) -> None:
        """Drop the activations that a failed pass has left in the hooks of Opacus."""
        for module in self.network.modules():
            getattr(module, "activations", []).clear()
            vars(module).pop("max_batch_len", None)
        for each in self.parameters:
            each._forward_counter = 0
            each.grad_sample = None
            vars(each).pop("_current_grad_sample", None)

    def _try_without_data(self) -> None:
        """Compute the gradient for an input of zeros, to find errors that don't depend on records.

        Raises TrainingError."""
        one = torch.zeros(1, dtype=torch.int64, device=self.context.device)
        inputs = torch.zeros_like(self.data.inputs_at(one))
        try:
            self._compute_gradients(Batch(inputs=inputs, labels=one, indices=one))
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise TrainingError(
                f"the gradients of single records can't be computed for this model: {text}; choose "
                "another model, or remove [privacy]"
            ) from error


def _require_finite(model: nn.Module, settings: LocalTraining, round_number: int) -> None:
    """Raise TrainingError if weights are NaN or infinite; the error reveals no single record."""
    if not all(bool(each.isfinite().all()) for each in trainable(model).values()):
        rate = settings.learning_rate_in(round_number)
        raise TrainingError(
            f"training diverged: weights are NaN or infinite at learning rate {rate:g}; lower "
            "training.learning_rate, or add less noise",
            learning_rate=rate,
        )
