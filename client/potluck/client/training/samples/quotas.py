"""Limits on the number of training samples per class, which the coordinator sets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.common.errors import ProtocolError, TrainingError
from potluck.common.task import Examples


def positions_within(
    examples: Examples, quotas: Sequence[float], *, classes: int, seed: int
) -> Tensor | None:
    """Return the positions of at most ⌊quotas[c]⌋ samples of each class c, in their old order.

    int64, on the labels' device; None stands for all samples, for example if `quotas` is empty. The
    samples are drawn uniformly with the training's seed. Raises ProtocolError for invalid quotas,
    TrainingError if no sample is left.
    """
    if not quotas:
        return None
    if len(quotas) != classes or any(math.isnan(quota) or quota < 0 for quota in quotas):
        raise ProtocolError(
            f"the coordinator gives quotas {list(quotas)[:20]}; {classes} numbers ≥ 0 are needed"
        )
    labels = examples.labels.cpu()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    keep = torch.zeros(len(labels), dtype=torch.bool)
    for label, quota in enumerate(quotas):
        mine = shuffled[labels[shuffled] == label]
        keep[mine[: int(min(quota, len(mine)))]] = True
    if not bool(keep.any()):
        raise TrainingError(
            "the selector's quotas leave the client none of its samples; its label counts were "
            "noisy or are out of date"
        )
    if bool(keep.all()):
        return None
    return keep.nonzero()[:, 0].to(examples.labels.device)
