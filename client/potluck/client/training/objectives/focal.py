"""Focal loss: smaller weight for samples already classified well (Lin et al., ICCV 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(frozen=True, kw_only=True)
class Focal(Objective):
    """Cross-entropy with less weight on samples that the model already predicts well.

    −(1 − p)^γ · log p, p the probability of the label (Eq. 4, without the weights α of classes).

    gamma ≥ 0: a larger value reduces the weight of samples with a large p; 0 is cross-entropy. The
    paper uses 2.
    """

    per_sample = True

    gamma: NonNegativeFloat = 2.0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the interface requires it
        """Return the focal loss, averaged over the batch."""
        logarithms = functional.log_softmax(logits, dim=1).gather(1, batch.labels[:, None])[:, 0]
        if not self.gamma:
            return -logarithms.mean()
        # 1 − p, but never 0: at 0 the gradient of (1 − p)^γ is infinite for γ < 1.
        rest = -logarithms.clamp_max(-1e-7).expm1()
        return -(rest.pow(self.gamma) * logarithms).mean()
