"""LeNet-5 (LeCun et al. 1998) in its usual modern form: ReLU, maximum pooling, and all feature maps
connected."""

from __future__ import annotations

from torch import nn


def lenet5(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """Return a model for inputs b × channels × 32 × 32; 62,006 parameters with three channels and
    ten classes."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
