"""The networks that tasks offer by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from potluck.common.errors import ConfigurationError

Build = Callable[[], nn.Module]
Networks = Mapping[str, Build]


def network(choices: Networks, name: str, *, task: str) -> nn.Module:
    """A new network. Raises ConfigurationError, listing the choices."""
    build = choices.get(name)
    if build is None:
        raise ConfigurationError(
            f"task {task}: there is no network {name!r}; there are: {', '.join(choices)}", task=task
        )
    return build()


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


def wide_cnn(channels: int = 1, classes: int = 10) -> nn.Module:
    """Two 5 × 5 convolutions with 32 and 64 channels, each pooled, and a layer of 512; 28 × 28."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


def perceptron(
    inputs: int, hidden: tuple[int, ...], classes: int, dropout: float = 0.0
) -> nn.Module:
    """Fully connected layers with ReLU, and dropout after each hidden one."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def lenet(channels: int = 3, classes: int = 10) -> nn.Module:
    """LeNet-5 for 32 × 32 images: 62,006 parameters with three channels and ten classes."""
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
