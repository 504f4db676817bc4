"""The output layer of a classifier, and estimates about the labels from its weight delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Form(Protocol):
    """An object with a type and a shape: an array, or a tensor in a file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...


def output_tensor(model: Mapping[str, Form], classes: int) -> str | None:
    """Return the name of the output layer's bias: the last tensor of `classes` numbers.

    Without a bias, return the name of the layer's weights: the last matrix of `classes` rows.
    Return None if the model has neither.
    """
    floating = {name: array for name, array in model.items() if array.dtype.kind == "f"}
    biases = [name for name, array in floating.items() if array.shape == (classes,)]
    weights = [
        name
        for name, array in floating.items()
        if len(array.shape) == 2 and array.shape[0] == classes and array.shape[1]
    ]
    found = biases or weights
    return found[-1] if classes and found else None


def label_entropies(moves: Floats, temperature: float) -> Floats:
    """Return Ĥ of each row, in nats in [0, ln C]: the entropy of softmax(row / temperature) (Chen
    and Vikalo 2024).

    moves: weight deltas, n × C, finite. temperature: above 0.
    """
    with np.errstate(over="ignore"):
        scaled = np.clip(moves / temperature, -1e300, 1e300)
    weights = np.exp(scaled - scaled.max(axis=1, initial=-math.inf, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    logarithms = np.log(np.where(shares > 0, shares, 1.0))
    entropies: Floats = np.abs((shares * logarithms).sum(axis=1))
    return entropies
