"""Deliberately wrong labels (as in FLASH): pure functions of labels, options and a seed.

A client's training samples may be mislabelled, including those that a run splits off for
validation. Its held-out samples and the coordinator's test set are never mislabelled.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from potluck.common.tasks.partition import Share

_CONCENTRATION = 100.0


@dataclass(frozen=True, kw_only=True)
class LabelNoise:
    """Options of a task whose clients may have wrong labels.

    label_noise: mean share of a noisy client's labels that are wrong, in [0, 0.99]. Each noisy
    client has its own rate, drawn from Beta(100 · label_noise, 100 − 100 · label_noise).
    noisy_clients: share of the clients that are noisy; noisy clients are chosen at random.
    """

    label_noise: Annotated[float, Field(ge=0, le=0.99)] = 0.0
    noisy_clients: Share = 1.0


def noise_rates(options: LabelNoise, clients: int, seed: int) -> NDArray[np.float64]:
    """Return each client's rate of wrong labels: K numbers in [0, 1]; 0 for a clean client."""
    generator = _generator(seed, clients)
    chosen = generator.permutation(clients)[: int(options.noisy_clients * clients + 0.5)]
    drawn = np.zeros(clients)
    if options.label_noise:
        mean = options.label_noise * _CONCENTRATION
        drawn[np.sort(chosen)] = generator.beta(mean, _CONCENTRATION - mean, size=len(chosen))
    return drawn


def with_wrong_labels(
    labels: NDArray[np.int64], classes: int, rate: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return a copy in which each label is replaced, with probability `rate`, by one of the other
    classes.

    labels: n, int64, in [0, classes). The wrong class is drawn uniformly (symmetric noise).
    """
    wrong = generator.random(len(labels)) < rate
    shift = generator.integers(1, max(2, classes), size=len(labels))
    return np.where(wrong, (labels + shift) % classes, labels)


def mislabelled(
    labels: Tensor, options: LabelNoise, *, classes: int, part: int, clients: int, seed: int
) -> Tensor:
    """Return the training labels of client number `part` (n, int64), some of them wrong as
    `options` specify."""
    rate = float(noise_rates(options, clients, seed)[part])
    if rate == 0:
        return labels
    wrong = with_wrong_labels(labels.numpy(), classes, rate, _generator(seed, clients, part))
    return torch.from_numpy(wrong)


def _generator(*words: int) -> np.random.Generator:
    return np.random.default_rng((zlib.crc32(b"label noise"), *words))
