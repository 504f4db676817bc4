"""The losses of the received model on a client's samples, summed up while it trains on them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

UTILITY = "utility"
"""Name of the number that is reported."""


class SquaredLosses:
    """The root mean square of cross-entropy over the samples of a training's first pass.

    Each sample counts as it is met, before its step: what Oort calls a client's statistical
    utility, without a pass of its own. One more softmax per step of the first pass; the device is
    not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._samples = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """A batch: logits b × C, labels b, int64."""
        with torch.no_grad():
            losses = functional.cross_entropy(logits.detach(), labels, reduction="none")
            self._sum += losses.double().square().sum()
        self._samples += len(labels)

    def root_mean_square(self) -> float:
        """NaN before the first sample. Waits for the device."""
        return (float(self._sum) / self._samples) ** 0.5 if self._samples else float("nan")


def utility(samples: int, root_mean_square: float) -> float:
    """|B| · √(mean squared loss). samples: those of a pass, as far as they are disclosed."""
    return samples * root_mean_square
