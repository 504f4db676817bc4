"""The convolutional network of the first paper on federated averaging."""

from __future__ import annotations

from torch import nn


def mnist_cnn(channels: int = 1, classes: int = 10, width: int = 512) -> nn.Sequential:
    """Return a network of two 5 × 5 convolutions with 32 and 64 channels, each pooled, and a layer
    of `width`.

    Inputs are b × channels × 28 × 28. McMahan et al. 2017, §3: 1,663,370 parameters by default.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )
