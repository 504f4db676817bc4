"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def perceptron(
    inputs: int = 54, hidden: Sequence[int] = (45, 30, 15), classes: int = 2, dropout: float = 0.2
) -> nn.Sequential:
    """Return linear layers with ReLU, and dropout after each hidden layer. Inputs: b × …, `inputs`
    numbers per sample.

    The default is the network that Düsing & Cimiano use for Covertype: 54-45-30-15-2, 4,352
    parameters.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
