"""FedProx: stay near the model that came (Li et al., MLSys 2020, Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(kw_only=True)
class FedProx(Objective):
    """(μ/2)·‖w − w^t‖² beside the loss, w^t the received model, over its trainable tensors.

    mu ≥ 0: how hard clients are held back; 0 is the loss alone. FedDiverse uses 0.1, NIID-Bench
    tunes over 0.001 to 1. FedDiverse prints the norm unsquared; squared, as in the FedProx paper,
    the pull grows with the distance.
    """

    per_sample = True

    mu: NonNegativeFloat = 0.1

    supervised = False

    def __post_init__(self) -> None:
        self.proximal = self.mu
        self.needs_received = self.mu > 0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """The term."""
        if not self.mu:
            return logits.new_zeros(())
        return proximal_term(local.parameters, local.received, self.mu)


def proximal_term(
    parameters: tuple[Tensor, ...], received: tuple[Tensor, ...], mu: float
) -> Tensor:
    """(μ/2)·‖w − w^t‖², a scalar; its gradient is μ·(w − w^t)."""
    squares = [(now - then).square().sum() for now, then in zip(parameters, received, strict=True)]
    return torch.stack(squares).sum() * (mu / 2)
