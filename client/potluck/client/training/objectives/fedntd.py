"""FedNTD: keep what the received model says of the other classes (Lee et al., NeurIPS 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(kw_only=True)
class FedNTD(Objective):
    """β·τ²·KL(received ‖ local) beside the loss, of probabilities among the classes that are not a
    sample's label, at temperature τ (Eq. 4 and 5; τ² as in the authors' code).

    beta ≥ 0: the weight; 0 is the loss alone. tau > 0: the temperature. The paper has 1 for both.
    What the received model says is computed once, before the first step.
    """

    beta: NonNegativeFloat = 1.0
    tau: PositiveFloat = 1.0

    supervised = False

    def __post_init__(self) -> None:
        self.needs_predictions = self.beta > 0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """The term, averaged over the batch."""
        if local.predictions is None:
            return logits.new_zeros(())
        # Logarithms of probabilities are logits up to a constant, which softmax ignores.
        smallest = torch.finfo(local.predictions.dtype).tiny
        received = local.predictions[batch.indices].clamp_min(smallest).log()
        theirs = _others(received / self.tau, batch.labels)
        own = _others(logits / self.tau, batch.labels)
        distance = functional.kl_div(own, theirs, reduction="batchmean", log_target=True)
        return self.beta * self.tau**2 * distance


def _others(logits: Tensor, labels: Tensor) -> Tensor:
    """Logarithms of the probabilities of the C − 1 classes that are not the label: b × (C − 1)."""
    batch, classes = logits.shape
    own = functional.one_hot(labels, classes).bool()
    return functional.log_softmax(logits[~own].view(batch, classes - 1), dim=1)
