"""FedBiO on the client: learns a weight for each of the client's samples along with the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.correction import (
    CorrectionContext,
    CorrectionOutcome,
    LocalCorrection,
    RunningCorrection,
)
from potluck.client.objective import Batch
from potluck.common.errors import DataError
from potluck.common.task import Examples

DIRECTION: Final = "direction"
"""The auxiliary u, received and sent: an estimate of (∇²_yy g)⁻¹·∇_y f."""
WEIGHTS: Final = "weights"


@dataclass(frozen=True, kw_only=True)
class FedBiOCorrection(LocalCorrection):
    """Weights each sample's cross-entropy by σ(λ_i).

    g is the weighted mean over a training batch; f is the unweighted mean over a batch of the
    samples held back.

    A step moves the model along −∇_y g. With derivatives at the step's start, it also computes
    u −= τ·(∇²_yy g·u − ∇_y f) and λ += η·∇²_λy g·u (∇_λ f is 0). The λ begin at 0 and never leave
    the client. tau, eta > 0. clip > 0: maximum norm of u.
    """

    tau: PositiveFloat = 0.01
    eta: PositiveFloat = 0.1
    clip: PositiveFloat = 10.0

    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """Begin with the kept λ; with 0 if none are kept or the number of samples has changed."""
        validation = context.validation
        if validation is None or len(validation) == 0:
            raise DataError(
                "FedBiO measures the model on held-back samples, but the client has none; set "
                "training.validation_share, and give each client at least two samples"
            )
        return _Descent(self, context, validation)


class _Descent:
    """FedBiO's steps in one training."""

    def __init__(
        self, options: FedBiOCorrection, context: CorrectionContext, validation: Examples
    ) -> None:
        self._options, self._positions = options, context.positions
        self._names = list(context.parameters)
        self._parameters = [context.parameters[name] for name in self._names]
        received = context.shared[DIRECTION]
        self._directions = [received[name].clone() for name in self._names]
        kept = None if context.kept is None else context.kept[WEIGHTS][WEIGHTS]
        if kept is None or len(kept) != context.samples:
            kept = torch.zeros(context.samples, device=validation.labels.device)
        self._weights = kept
        self._validation = validation
        self._batches = _batches(validation, context.settings.batch_size, context.seed)

    def descend(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the gradients to ∇_y g, and update u and the batch's λ."""
        rows = batch.indices if self._positions is None else self._positions[batch.indices]
        own = self._weights[rows].requires_grad_()
        logits = network(batch.inputs)
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        lower = (torch.sigmoid(own) * losses).mean()
        gradients = _gradients(lower, self._parameters, create_graph=True)
        products = second_derivatives(gradients, self._directions, [*self._parameters, own])
        held_back = next(self._batches)
        upper = functional.cross_entropy(
            network(self._validation.inputs_at(held_back)),
            self._validation.labels.index_select(0, held_back),
        )
        wanted = _gradients(upper, self._parameters)
        self._directions = next_directions(
            self._directions, products[:-1], wanted, self._options.tau, self._options.clip
        )
        self._weights[rows] = own.detach() + self._options.eta * products[-1]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.detach()
        return lower.detach(), logits.detach()

    def correct(self) -> None:
        """Leave the gradients unchanged."""

    def finish(self, normalizer: float) -> CorrectionOutcome:  # noqa: ARG002  part of the interface
        """Return u, to be sent, and the λ, to be kept."""
        return CorrectionOutcome(
            send={DIRECTION: dict(zip(self._names, self._directions, strict=True))},
            keep={WEIGHTS: {WEIGHTS: self._weights}},
        )


def second_derivatives(
    gradients: Sequence[Tensor], directions: Sequence[Tensor], variables: Sequence[Tensor]
) -> list[Tensor]:
    """Return ∂(gradients · directions)/∂v for each variable v; the gradients must have a graph."""
    along = torch.stack([(g * u).sum() for g, u in zip(gradients, directions, strict=True)]).sum()
    return [each.detach() for each in _gradients(along, variables)]


def _gradients(
    value: Tensor, variables: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """Return the gradients; zeros for variables that the value does not depend on."""
    found = torch.autograd.grad(value, variables, create_graph=create_graph, allow_unused=True)
    return [
        torch.zeros_like(v) if each is None else each
        for v, each in zip(variables, found, strict=True)
    ]


def next_directions(
    directions: Sequence[Tensor],
    products: Sequence[Tensor],
    wanted: Sequence[Tensor],
    tau: float,
    clip: float,
) -> list[Tensor]:
    """Return u − τ·(∇²g·u − ∇f), with its norm over all tensors limited to `clip`."""
    moved = [
        u - tau * (product - gradient)
        for u, product, gradient in zip(directions, products, wanted, strict=True)
    ]
    length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in moved]))
    scale = (clip / length.clamp_min(1e-12)).clamp_max(1.0)
    return [u * scale for u in moved]


def _batches(samples: Examples, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the positions of each batch, without end; shuffle again after each pass."""
    order = torch.Generator().manual_seed(seed ^ 0xB10)
    while True:
        shuffled = torch.randperm(len(samples), generator=order).to(samples.labels.device)
        yield from torch.split(shuffled, size)
