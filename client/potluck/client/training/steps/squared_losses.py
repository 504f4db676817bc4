"""The squared losses on a client's samples, summed up during the first pass of a training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

UTILITY = "utility"
"""Name, in a report, of the number that `utility` returns."""


class SquaredLosses:
    """The root mean square of cross-entropy over the samples of a training's first pass.

    Each sample's loss is measured before the step that uses the sample. Oort's statistical utility
    of a client follows from this value, without another pass over the samples. Costs one softmax
    per step of the first pass; does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._samples = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. logits: b × C. labels: b, int64."""
        with torch.no_grad():
            losses = functional.cross_entropy(logits.detach(), labels, reduction="none")
            self._sum += losses.double().square().sum()
        self._samples += len(labels)

    def root_mean_square(self) -> float:
        """Return the root mean square; NaN before the first sample. Waits for the device."""
        return (float(self._sum) / self._samples) ** 0.5 if self._samples else float("nan")


def utility(samples: int, root_mean_square: float) -> float:
    """Return |B| · √(mean squared loss). samples: |B|, the disclosed number of samples."""
    return samples * root_mean_square
