"""FedNTD: keep the received model's predictions for other classes (Lee et al., NeurIPS 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(kw_only=True)
class FedNTD(Objective):
    """Keeps predictions for all classes but the label's near those of the received model.

    Adds β·τ²·KL(received ‖ local) to the loss (Eq. 4 and 5; τ² as in the authors' code).

    The KL divergence is over all classes except the sample's label, at temperature τ. beta ≥ 0: the
    weight; 0 adds nothing. tau > 0: the temperature. The paper uses 1 for both. The received
    model's predictions are computed once, before the first step.
    """

    beta: NonNegativeFloat = 1.0
    tau: PositiveFloat = 1.0

    supervised = False

    def __post_init__(self) -> None:
        self.needs_predictions = self.beta > 0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the term, averaged over the batch."""
        if local.predictions is None:
            return logits.new_zeros(())
        # Log-probabilities are logits up to a constant, which softmax ignores.
        smallest = torch.finfo(local.predictions.dtype).tiny
        received = local.predictions[batch.indices].clamp_min(smallest).log()
        theirs = _others(received / self.tau, batch.labels)
        own = _others(logits / self.tau, batch.labels)
        distance = functional.kl_div(own, theirs, reduction="batchmean", log_target=True)
        return self.beta * self.tau**2 * distance


def _others(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities over the C − 1 classes other than the label: b × (C − 1)."""
    batch, classes = logits.shape
    own = functional.one_hot(labels, classes).bool()
    return functional.log_softmax(logits[~own].view(batch, classes - 1), dim=1)
