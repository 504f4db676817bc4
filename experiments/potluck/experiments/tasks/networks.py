"""The networks that tasks offer by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

Build = Callable[[], nn.Module]
Networks = Mapping[str, Build]


def small_cnn(channels: int = 1, classes: int = 10) -> nn.Module:
    """Two 5 × 5 convolutions with 6 and 16 channels, each pooled, layers of 120 and 84; 28 × 28.

    The widths are NIID-Bench's: 44,426 parameters with one channel and ten classes.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
