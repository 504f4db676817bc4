"""Clients' reports about themselves, made fit for arithmetic: they may be lies or nonsense.

Losses and durations can't be checked. A value that is no number counts as none, and one far above
the others counts as little more than theirs: so one client can't drown the rest of a federation.
"""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Answers, Floats

LARGEST = 1e9
"""No loss per sample and no duration in seconds is larger; squares of it are still exact enough."""


def column(answers: Answers, name: str, length: int) -> Floats:
    """One value of every client as a column of `length` rows; NaN where none came."""
    values = np.full(length, np.nan)
    if name in answers.values:
        values[answers.rows] = answers.values[name]
    return values


def plausible(values: Floats, *, factor: float) -> Floats:
    """A copy without what can't be: NaN for what is negative or infinite; the rest in [0, limit].

    The limit is `factor` times the median of the values above zero (and at most 10^9), which more
    than half of the clients would have to lie about to move.
    """
    result = np.where(np.isfinite(values) & (values >= 0), values, np.nan)
    np.minimum(result, LARGEST, out=result)  # first: of two numbers near the limit no median is one
    positive = result[result > 0]
    if len(positive):
        np.minimum(result, factor * float(np.median(positive)), out=result)
    return result
