"""The networks that tasks offer by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

Build = Callable[[], nn.Module]
Networks = Mapping[str, Build]


def small_cnn(channels: int = 1, classes: int = 10) -> nn.Module:
    """Return a CNN for 28 × 28 pixels: two pooled 5 × 5 convolutions, layers of 120 and 84.

    The convolutions have 6 and 16 channels, as in NIID-Bench: 44,426 parameters with one input
    channel and ten classes.
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


def dropout_cnn(channels: int = 1, classes: int = 10) -> nn.Module:
    """Return a CNN for 28 × 28: two pooled 5 × 5 convolutions (10, 20 channels), two linear layers.

    The linear layers have 50 and `classes` outputs, with dropout (0.5) between.

    Distribution-controlled selection trains two convolutions and two linear layers with dropout on
    MNIST. The paper gives no widths; these give 21,840 parameters.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20 * 4 * 4, 50),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(50, classes),
    )


def photograph_cnn(classes: int) -> nn.Module:
    """Return a network of three convolutions, fast on a CPU, to replace a pre-trained one."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 16, classes),
    )
