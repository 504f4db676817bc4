"""Balanced softmax: logits adjusted by how frequent each class is at the client.

Ren et al., NeurIPS 2020 (Eq. 4); with another τ the logit-adjusted loss of Menon et al., ICLR 2021
(Eq. 10).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective


@dataclass(frozen=True, kw_only=True)
class BalancedSoftmax(Objective):
    """Cross-entropy that gives samples of a client's rare classes more influence.

    The logits are z_c + τ·log π_c; π_c: share of class c in the client's samples.

    tau ≥ 0: strength of the adjustment; 0 is cross-entropy, 1 balanced softmax. Samples of a rare
    class then have more influence. Classes without samples at the client are excluded.
    """

    tau: NonNegativeFloat = 1.0

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the cross-entropy of the adjusted logits, averaged over the batch."""
        if not self.tau:
            return functional.cross_entropy(logits, batch.labels)
        adjusted = logits + self.adjustments(local.label_counts).to(logits.dtype)
        return functional.cross_entropy(adjusted, batch.labels)

    def adjustments(self, label_counts: Tensor) -> Tensor:
        """Return the number to add to each class's logit: C, float32 ≤ 0, −∞ for absent classes."""
        counts = label_counts.float()
        shares = counts / counts.sum().clamp_min(1.0)
        # τ·log 0 must be −∞ even for a τ that underflows.
        return (self.tau * shares.log()).masked_fill(counts == 0, -torch.inf)
