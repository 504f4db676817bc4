"""The output layer of a classifier, and what its delta in a training discloses of the labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Form(Protocol):
    """Type and shape of a tensor; an array has them, and so has a tensor in a file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...


def output_tensor(model: Mapping[str, Form], classes: int) -> str | None:
    """Return the name of the output layer's bias: the last tensor of `classes` numbers. Without a
    bias, return that of its weights: the last matrix of `classes` rows. None if there is
    neither."""
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
    """Ĥ of each row, in nats in [0, ln C]: the entropy of softmax(move / temperature) (Chen and
    Vikalo 2024). moves: n × C, finite. temperature: above 0."""
    with np.errstate(over="ignore"):
        scaled = np.clip(moves / temperature, -1e300, 1e300)
    weights = np.exp(scaled - scaled.max(axis=1, initial=-math.inf, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    logarithms = np.log(np.where(shares > 0, shares, 1.0))
    entropies: Floats = np.abs((shares * logarithms).sum(axis=1))
    return entropies
