"""Limits on the number of samples by which a client's update is weighted. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import SampleLimits

Samples = NDArray[np.int64]


def counted(samples: Samples, limits: SampleLimits) -> Samples:
    """Return the numbers of samples, limited by `maximum` and by `maximum_multiple` × the median of
    the others.

    Each result is at least 1. The median is over all other clients: a client's own report must not
    raise its limit, even with few clients.
    """
    bounds = limits.maximum_multiple * _medians_of_others(samples)
    if limits.maximum is not None:
        bounds = np.minimum(bounds, limits.maximum)
    within = np.maximum(1, np.floor(np.minimum(samples, bounds)))
    # Numbers within bounds are not converted to float64, so they stay exact.
    return np.where(samples <= bounds, samples, within).astype(np.int64)


def _medians_of_others(samples: Samples) -> NDArray[np.float64]:
    """Return, for each number, the median of all other numbers; infinity if there is only one
    number."""
    others = len(samples) - 1
    if others < 1:
        return np.full(len(samples), np.inf)
    ordered = np.sort(samples)
    ranks = np.empty(len(samples), np.int64)
    ranks[np.argsort(samples, kind="stable")] = np.arange(len(samples))
    low, high = (others - 1) // 2, others // 2
    # If the number of rank r is removed, all later ranks fall by one.
    lower, upper = (ordered[place + (ranks <= place)] for place in (low, high))
    medians: NDArray[np.float64] = (lower.astype(np.float64) + upper.astype(np.float64)) / 2
    return medians
