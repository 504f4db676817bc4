"""FLASH's loss for noisy labels: the labels, pseudo-labels and a reverse term.

Federated Learning Across Simultaneous Heterogeneities; the reverse term is that of symmetric
cross-entropy (Wang et al., ICCV 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective

LOGARITHM_OF_ZERO: Final = -4.0
"""A in the paper: log 0 in the reverse term, whose value is then −A·(1 − p_label)."""


@dataclass(kw_only=True)
class NoiseRobust(Objective):
    """Loss that tolerates wrong labels, with pseudo-labels and reverse cross-entropy (RCE).

    CE(labels) + α·CE(pseudo-labels) + β·RCE(labels).

    Pseudo-labels are the probabilities that the received model gives each sample, fixed for the
    round. alpha, beta ≥ 0: weights of the second and third term; the paper's captions name (1, 1)
    for CIFAR-10 and (5, 1) for FEMNIST.
    """

    alpha: NonNegativeFloat = 1.0
    beta: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        self.needs_predictions = self.alpha > 0  # for the pseudo-labels

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the sum of the three terms, averaged over the batch."""
        believed = None if local.predictions is None else local.predictions[batch.indices]
        return noise_robust_loss(logits, batch.labels, believed, self.alpha, self.beta).mean()


def noise_robust_loss(
    logits: Tensor, labels: Tensor, believed: Tensor | None, alpha: float, beta: float
) -> Tensor:
    """Return each sample's loss: b. logits: b × C. labels: b, int64.

    believed: the pseudo-labels, probabilities, b × C; None omits the second term.
    """
    logarithms = functional.log_softmax(logits, dim=1)
    own = logarithms.gather(1, labels[:, None])[:, 0]
    loss = -own
    if believed is not None:
        loss = loss - alpha * (believed * logarithms).sum(dim=1)
    return loss + beta * reverse_cross_entropy(own.exp())


def reverse_cross_entropy(probabilities: Tensor) -> Tensor:
    """Return −A·(1 − p) for probabilities p of the labels, of any shape."""
    return -LOGARITHM_OF_ZERO * (1.0 - probabilities)
