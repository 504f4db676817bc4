"""FedRS: smaller updates for classes that a client has no samples of (Li and Zhan, KDD 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(frozen=True, kw_only=True)
class FedRS(Objective):
    """Cross-entropy with smaller logits for classes of which the client has no samples.

    alpha in [0, 1]: the scale of absent classes; 1 is cross-entropy. soft: scale every class by
    α + (1 − α)·n_c / max n instead, so that logits of rare classes are scaled down too. The bias is
    part of the scaled logit. Scaling raises negative logits of absent classes.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    soft: bool = False

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the cross-entropy of the scaled logits, averaged over the batch."""
        scales = self.scales(local.label_counts).to(logits.dtype)
        return functional.cross_entropy(logits * scales, batch.labels)

    def scales(self, label_counts: Tensor) -> Tensor:
        """Return the factor of each class's logit: C, float32 in [α, 1]."""
        counts = label_counts.float()
        presence = counts / counts.amax().clamp_min(1.0) if self.soft else (counts > 0).float()
        return torch.lerp(
            torch.full_like(presence, self.alpha), torch.ones_like(presence), presence
        )
