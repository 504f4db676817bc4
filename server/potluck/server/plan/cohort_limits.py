"""Limits of a cohort: on the number of samples by which an update is weighted, and on the number of
clients that share the value of a tag, such as a site. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.run_file.run_settings import SampleLimits
from potluck.server.selection import Rows

# Samples ------------------------------------------------------------------------------------------

Samples = NDArray[np.int64]


def counted(samples: Samples, limits: SampleLimits) -> Samples:
    """Return the numbers of samples, limited by `maximum` and by `maximum_multiple` × the median of
    the other clients' numbers.

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


# Tags ---------------------------------------------------------------------------------------------


def narrowed(
    chosen: Rows, available: Rows, limits: Sequence[tuple[Sequence[str], int]]
) -> Rows | None:
    """Return the rows to repeat the choice from, if too many chosen clients share a tag's value.

    If too many chosen clients have a value, only the first of them and clients with other values
    remain in the rows. Returns None if the cohort is within all limits.

    The repetition ends: each time, fewer clients with the value remain, until their number is
    within the limit. So this works with any selector, and its first choices are kept.

    chosen: rows in the order chosen. limits: for each limited tag, the value of every row of the
    run's clients, and the maximum number of clients with the same value.
    """
    excess = np.zeros(0, dtype=np.int64)
    for values, most in limits:
        column = np.array([values[row] for row in chosen])
        for value in np.unique(column):
            first = chosen[column == value][:most]
            if np.count_nonzero(column == value) > most:
                sharing = [row for row in available.tolist() if values[row] == value]
                excess = np.union1d(excess, np.setdiff1d(sharing, first))
    return np.setdiff1d(available, excess) if len(excess) else None


def ineligible(tags: Mapping[str, str], eligible: Mapping[str, Sequence[str]]) -> str:
    """Return why clients of a host with these tags are excluded; empty if they are not."""
    for name, values in eligible.items():
        if tags.get(name) not in values:
            has = f"is {tags[name]!r}" if name in tags else "is not set"
            return (
                f"the tag {name} of the host {has}, but selector_limits.eligible of the run "
                f"accepts only {', '.join(map(repr, values))}; change the run's setting, or "
                "change the tag in the host's configuration and restart the host"
            )
    return ""
