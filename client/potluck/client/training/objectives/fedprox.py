"""FedProx: stay near the received model (Li et al., MLSys 2020, Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(kw_only=True)
class FedProx(Objective):
    """Keeps the local weights near the received model.

    Adds (μ/2)·‖w − w^t‖² to the loss, over the trainable tensors; w^t is the received model.

    mu ≥ 0: strength of the pull towards w^t; 0 adds nothing. FedDiverse uses 0.1, NIID-Bench tunes
    over 0.001 to 1. FedDiverse prints the norm without the square; here it is squared, as in the
    FedProx paper, so the pull grows with the distance.
    """

    per_sample = True

    mu: NonNegativeFloat = 0.1

    supervised = False

    def __post_init__(self) -> None:
        self.proximal = self.mu
        self.needs_received = self.mu > 0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        """Return the proximal term."""
        if not self.mu:
            return logits.new_zeros(())
        return proximal_term(local.parameters, local.received, self.mu)


def proximal_term(
    parameters: tuple[Tensor, ...], received: tuple[Tensor, ...], mu: float
) -> Tensor:
    """Return (μ/2)·‖w − w^t‖², a scalar; its gradient is μ·(w − w^t)."""
    squares = [(now - then).square().sum() for now, then in zip(parameters, received, strict=True)]
    return torch.stack(squares).sum() * (mu / 2)
