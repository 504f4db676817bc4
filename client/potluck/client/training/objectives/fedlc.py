"""FedLC: margins between classes, larger for classes with few samples (Zhang et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional

from potluck.client.objective import Batch, LocalContext, Objective

_LEAST_COUNT = 1e-8
"""Replaces a count of 0: (1e-8)^(−1/4) = 100, a margin that nearly excludes the class."""


@dataclass(frozen=True, kw_only=True)
class FedLC(Objective):
    """Cross-entropy with larger margins for classes of which the client has few samples.

    The logits are u_c = z_c − τ·n_c^(−1/4); n_c: the client's number of samples of class c.

    tau ≥ 0: size of the margins; 0 is cross-entropy. denominator: `all` classes, as in any
    softmax, or `others`, as in the paper, which excludes the label's own class: that loss has no
    lower bound, and trainings with it have collapsed. absent: classes without samples get a margin
    of 100·τ (`margin`) or are excluded (`mask`).
    """

    tau: NonNegativeFloat = 1.0
    denominator: Literal["all", "others"] = "all"
    absent: Literal["margin", "mask"] = "margin"

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the calibrated loss, averaged over the batch; uses log-sum-exp for stability."""
        calibrated = logits - self.margins(local.label_counts).to(logits.dtype)
        if self.denominator == "all":
            return functional.cross_entropy(calibrated, batch.labels)
        own = calibrated.gather(1, batch.labels[:, None])
        others = calibrated.scatter(1, batch.labels[:, None], -torch.inf)
        return (others.logsumexp(dim=1) - own[:, 0]).mean()

    def margins(self, label_counts: Tensor) -> Tensor:
        """Return the margin to subtract from each class's logit: C, float32 ≥ 0."""
        counts = label_counts.float()
        margins = self.tau * counts.clamp_min(_LEAST_COUNT).pow(-0.25)
        return margins.masked_fill(counts == 0, torch.inf) if self.absent == "mask" else margins
