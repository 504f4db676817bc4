"""Generalized cross-entropy: smaller gradients for hard, perhaps mislabelled, samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(frozen=True, kw_only=True)
class GeneralizedCrossEntropy(Objective):
    """Loss that tolerates wrong labels: hard samples have smaller gradients.

    (1 − p^q) / q, p the probability of the label.

    q in (0, 1]: towards 0 the loss becomes cross-entropy, at 1 the mean absolute error. Zhang and
    Sabuncu, NeurIPS 2018; FedDiverse uses it to train a biased model on purpose.
    """

    per_sample = True

    q: Annotated[float, Field(gt=0, le=1)] = 0.3

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        """Return (1 − softmax(logits)[label]^q) / q, averaged over the batch."""
        return generalized_cross_entropy(logits, batch.labels, self.q)


def generalized_cross_entropy(logits: Tensor, labels: Tensor, q: float) -> Tensor:
    """Return the batch's mean of (1 − p^q) / q. logits: b × C. labels: b, int64. q in (0, 1]."""
    logarithms = functional.log_softmax(logits, dim=1).gather(1, labels[:, None])
    return -(q * logarithms).expm1().mean() / q
