"""FedBiO on the client: learns weights of the client's own samples along with the model."""

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
"""The auxiliary u, both ways: an estimate of (∇²_yy g)⁻¹·∇_y f."""
WEIGHTS: Final = "weights"


@dataclass(frozen=True, kw_only=True)
class FedBiOCorrection(LocalCorrection):
    """Each sample's cross-entropy counts with σ(λ_i): g is their mean over a batch of the samples
    trained on, f the plain mean over one of those kept back.

    A step goes along −∇_y g, and from where it began u −= τ·(∇²_yy g·u − ∇_y f) and
    λ += η·∇²_λy g·u, as ∇_λ f is 0. The λ begin at 0, stay with the client and never leave it.
    tau, eta > 0. clip > 0: the longest u.
    """

    tau: PositiveFloat = 0.01
    eta: PositiveFloat = 0.1
    clip: PositiveFloat = 10.0

    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """The λ are the kept ones; 0 if there are none or the number of samples has changed."""
        validation = context.validation
        if validation is None or len(validation) == 0:
            raise DataError(
                "FedBiO measures the model on samples that the client keeps back, and it has none; "
                "set training.validation_share, and give each client two samples or more"
            )
        return _Descent(self, context, validation)


class _Descent:
    """A `RunningDescent`."""

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
        """∇_y g, and a step of u and of the batch's λ."""
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
        """The gradients stay as they are."""

    def finish(self, normalizer: float) -> CorrectionOutcome:  # noqa: ARG002  part of the seam
        """u to send, the λ to keep."""
        return CorrectionOutcome(
            send={DIRECTION: dict(zip(self._names, self._directions, strict=True))},
            keep={WEIGHTS: {WEIGHTS: self._weights}},
        )


def second_derivatives(
    gradients: Sequence[Tensor], directions: Sequence[Tensor], variables: Sequence[Tensor]
) -> list[Tensor]:
    """∂(gradients · directions)/∂v for each of the variables; gradients have a graph."""
    along = torch.stack([(g * u).sum() for g, u in zip(gradients, directions, strict=True)]).sum()
    return [each.detach() for each in _gradients(along, variables)]


def _gradients(
    value: Tensor, variables: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """Zeros for variables that the value does not depend on."""
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
    """u − τ·(∇²g·u − ∇f), scaled back to a length of `clip` over all tensors where it is longer."""
    moved = [
        u - tau * (product - gradient)
        for u, product, gradient in zip(directions, products, wanted, strict=True)
    ]
    length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in moved]))
    scale = (clip / length.clamp_min(1e-12)).clamp_max(1.0)
    return [u * scale for u in moved]


def _batches(samples: Examples, size: int, seed: int) -> Iterator[Tensor]:
    """Positions of batches, one random order after the other, without end."""
    order = torch.Generator().manual_seed(seed ^ 0xB10)
    while True:
        shuffled = torch.randperm(len(samples), generator=order).to(samples.labels.device)
        yield from torch.split(shuffled, size)
