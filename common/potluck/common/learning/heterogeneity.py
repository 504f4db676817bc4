"""Metrics of class and attribute imbalance: a triplet per client, six metrics per federation.

An interaction matrix counts samples by class (rows) and by binary attribute (two columns). Its
triplet is (CI, AI, SC): class imbalance, attribute imbalance, spurious correlation (FedDiverse §4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from potluck.common.errors import ConfigurationError

Floats = NDArray[np.float64]

_ROUNDING: Final = 1e-13
"""Smallest component of a triplet that is not a rounding error. One sample more or less changes an
even matrix by more, up to a million samples."""


@dataclass(frozen=True, kw_only=True)
class FederatedHeterogeneity:
    """Six metrics in [0, 1] of how heterogeneous a federation is (FedDiverse §3).

    gci, gai, gsc: the triplet of all clients' samples together. cci, cai, csc: the mean of the
    clients' triplets, each client with the same weight.
    """

    gci: float
    gai: float
    gsc: float
    cci: float
    cai: float
    csc: float


def entropy(shares: Floats) -> Floats:
    """Return the Shannon entropy in nats over the last axis. Rows are normalised first; the entropy
    of a row of zeros is 0."""
    totals = shares.sum(axis=-1, keepdims=True)
    probabilities = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
    logarithms = np.log(probabilities, out=np.zeros_like(shares), where=probabilities > 0)
    result: Floats = -(probabilities * logarithms).sum(axis=-1)
    return result.clip(min=0.0)  # avoid -0.0, for a row with a single class


def triplets(matrices: ArrayLike) -> Floats:
    """Return the triplets (K × 3, in [0, 1]) of K interaction matrices (K × classes × 2, ≥ 0).

    The number of classes is the federation's, even if a client lacks some. SC is 0 if a client has
    a single class and a single attribute; all three numbers are 0 if it has no samples. A matrix
    with a NaN gets a row of NaN. Raises ConfigurationError if the shape differs, or a count is
    negative.
    """
    counts = np.asarray(matrices, dtype=np.float64)
    if counts.ndim != 3 or counts.shape[1] < 2 or counts.shape[2] != 2:
        raise ConfigurationError(
            f"interaction matrices have shape {counts.shape}; the shape must be clients × "
            "classes × 2, with at least two classes"
        )
    if (counts < 0).any():
        raise ConfigurationError(
            "an interaction matrix has a negative count; all counts must be ≥ 0"
        )
    clients, classes, _ = counts.shape
    class_entropy = entropy(counts.sum(axis=2))
    attribute_entropy = entropy(counts.sum(axis=1))
    joint_entropy = entropy(counts.reshape(clients, -1))
    marginal = class_entropy + attribute_entropy
    mutual = marginal - joint_entropy
    correlation = np.divide(2 * mutual, marginal, out=np.zeros(clients), where=marginal > 0)
    imbalances = (1 - class_entropy / np.log(classes), 1 - attribute_entropy / np.log(2))
    result: Floats = np.stack([*imbalances, correlation], axis=1).clip(0.0, 1.0)
    result[result < _ROUNDING] = 0.0
    totals = counts.sum(axis=(1, 2))
    result[totals == 0] = 0.0
    result[np.isnan(totals)] = np.nan
    return result


def triplet(matrix: ArrayLike) -> tuple[float, float, float]:
    """Return (CI, AI, SC) of one interaction matrix (classes × 2); see `triplets`."""
    class_imbalance, attribute_imbalance, correlation = triplets(np.asarray(matrix)[None])[0]
    return float(class_imbalance), float(attribute_imbalance), float(correlation)


def federated_heterogeneity(matrices: ArrayLike) -> FederatedHeterogeneity:
    """Return a federation's six metrics from its clients' matrices (K × classes × 2, K ≥ 1).

    Raises ConfigurationError as `triplets` does, and if `matrices` is empty.
    """
    counts = np.asarray(matrices, dtype=np.float64)
    if len(counts) == 0:
        raise ConfigurationError(
            "no interaction matrix was given; pass the matrix of at least one client"
        )
    gci, gai, gsc = triplet(counts.sum(axis=0))
    cci, cai, csc = triplets(counts).mean(axis=0).tolist()
    return FederatedHeterogeneity(gci=gci, gai=gai, gsc=gsc, cci=cci, cai=cai, csc=csc)
