"""Symmetric cross-entropy: adds the reverse cross-entropy, for noisy labels (Wang et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(frozen=True, kw_only=True)
class SymmetricCrossEntropy(Objective):
    """Loss that tolerates wrong labels: cross-entropy plus reverse cross-entropy (RCE).

    α·CE + β·RCE, RCE = −A·(1 − p) with p the probability of the label.

    alpha, beta ≥ 0: weights; RHFL uses 0.1 and 1. zero: replaces the 0 in log 0, in (0, 1); A is
    its logarithm. RHFL's code uses 1e-4.
    """

    per_sample = True

    alpha: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 1.0
    zero: Annotated[float, Field(gt=0, lt=1)] = 1e-4

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        """Return the sum of both terms, averaged over the batch."""
        logarithms = functional.log_softmax(logits, dim=1).gather(1, batch.labels[:, None])[:, 0]
        reverse = -math.log(self.zero) * -logarithms.expm1()
        return (self.beta * reverse - self.alpha * logarithms).mean()
