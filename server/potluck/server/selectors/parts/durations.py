"""Estimates of the durations of clients' trainings, for selectors."""

from __future__ import annotations

import math

import numpy as np

from potluck.server.selection import Floats, RoundOutcome
from potluck.server.selectors.parts.reported import plausible

_FACTOR = 10.0
"""Maximum plausible duration, as a multiple of the clients' median; longer durations are reduced to
it."""
LEAST = 1e-6
"""Minimum duration in seconds."""


def noted(seconds: Floats, outcome: RoundOutcome) -> Floats:
    """Return the durations, updated with those of a round. seconds: one per client, NaN if unknown.

    If a client failed and the round had a deadline, the deadline is used as its duration. A client
    that over-selection made unnecessary was slower than all others, so an unknown duration of it
    becomes the longest of the round.
    """
    result = seconds.copy()
    measured = np.isfinite(outcome.seconds) & (outcome.seconds >= 0)
    result[outcome.selected[measured]] = outcome.seconds[measured]
    failed = np.setdiff1d(outcome.selected, outcome.included)
    if np.isfinite(outcome.deadline_seconds):
        result[failed] = outcome.deadline_seconds
    unknown = outcome.surplus[np.isnan(result[outcome.surplus])]
    result[unknown] = longest(outcome)
    return result


def longest(outcome: RoundOutcome) -> float:
    """Return the longest duration of the round's clients that sent an update in time; NaN if there
    is none."""
    known = outcome.seconds[np.isfinite(outcome.seconds) & (outcome.seconds >= 0)]
    return float(known.max()) if len(known) else math.nan


def within_reason(seconds: Floats) -> Floats:
    """Limit durations to the range from 10⁻⁶ s to ten times the median; unknown durations stay
    NaN."""
    return np.maximum(plausible(seconds, factor=_FACTOR), LEAST)


def known_or_mean(seconds: Floats) -> Floats:
    """Replace unknown durations by the mean of the known ones, or by 1 s if none is known."""
    found = within_reason(seconds)
    known = ~np.isnan(found)
    return np.where(known, found, found[known].mean() if known.any() else 1.0)


def estimated(seconds: Floats, told: Floats) -> Floats:
    """Replace unknown durations by the clients' own estimates, which exist on a virtual clock.

    told: the clients' estimates in seconds; 0 on a real clock.
    """
    return np.where(np.isnan(seconds) & (told > 0), told, seconds)
