"""Durations of clients' last trainings, as selectors estimate them."""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Floats, RoundOutcome
from potluck.server.selectors.parts.reported import plausible

_FACTOR = 10.0
"""Maximum plausible duration, as a multiple of the median; longer ones are limited to it."""
_LEAST = 1e-6


def noted(seconds: Floats, outcome: RoundOutcome) -> Floats:
    """Return the durations after a round. seconds: one per client, NaN if unknown.

    A client that failed is given the deadline as its duration, if there is one.
    """
    result = seconds.copy()
    measured = np.isfinite(outcome.seconds) & (outcome.seconds >= 0)
    result[outcome.selected[measured]] = outcome.seconds[measured]
    failed = np.setdiff1d(outcome.selected, outcome.included)
    if np.isfinite(outcome.deadline_seconds):
        result[failed] = outcome.deadline_seconds
    return result


def within_reason(seconds: Floats) -> Floats:
    """Limit durations to between 10⁻⁶ s and ten times the median; NaN if unknown."""
    return np.maximum(plausible(seconds, factor=_FACTOR), _LEAST)


def known_or_mean(seconds: Floats) -> Floats:
    """Fill unknown durations with the mean of the others; 1 s if none is known."""
    found = within_reason(seconds)
    known = ~np.isnan(found)
    return np.where(known, found, found[known].mean() if known.any() else 1.0)


def estimated(seconds: Floats, told: Floats) -> Floats:
    """Fill unknown durations with the clients' own estimates on a virtual clock.

    told: the clients' estimates in seconds; 0 on a real clock.
    """
    return np.where(np.isnan(seconds) & (told > 0), told, seconds)
