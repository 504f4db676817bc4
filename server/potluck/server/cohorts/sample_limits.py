"""Limits on the number of samples that a client is weighted by. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import SampleLimits

Samples = NDArray[np.int64]


def counted(samples: Samples, limits: SampleLimits) -> Samples:
    """Numbers of samples, each at least 1, bounded by `maximum` and by `maximum_multiple` times the
    median of the others'.

    Of the others: a client's own report must not raise its bound, however few clients there are.
    """
    bounds = limits.maximum_multiple * _medians_of_others(samples)
    if limits.maximum is not None:
        bounds = np.minimum(bounds, limits.maximum)
    within = np.maximum(1, np.floor(np.minimum(samples, bounds)))
    # Numbers that are within bounds are taken as they are, not by way of float64.
    return np.where(samples <= bounds, samples, within).astype(np.int64)


def _medians_of_others(samples: Samples) -> NDArray[np.float64]:
    """For each its others' median; infinity for one alone."""
    others = len(samples) - 1
    if others < 1:
        return np.full(len(samples), np.inf)
    ordered = np.sort(samples)
    ranks = np.empty(len(samples), np.int64)
    ranks[np.argsort(samples, kind="stable")] = np.arange(len(samples))
    low, high = (others - 1) // 2, others // 2
    # Without the one of rank r, those from r on move down by one place.
    lower, upper = (ordered[place + (ranks <= place)] for place in (low, high))
    medians: NDArray[np.float64] = (lower.astype(np.float64) + upper.astype(np.float64)) / 2
    return medians
