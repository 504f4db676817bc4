"""Limits for the numbers that clients report about themselves, which may be false or invalid.

Losses and durations can't be checked. A value that is not a number counts as missing. A value far
above those of other clients is limited, so that one client can't dominate the federation.
"""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Answers, Floats

LARGEST = 1e9
"""Maximum accepted loss per sample, and duration in seconds. Its square is still precise enough in
float64."""


def column(answers: Answers, name: str, length: int) -> Floats:
    """Return one value per client, as a column of `length` rows; NaN if the client sent none."""
    values = np.full(length, np.nan)
    if name in answers.values:
        values[answers.rows] = answers.values[name]
    return values


def plausible(values: Floats, *, factor: float) -> Floats:
    """Return a copy with NaN for negative or infinite values, and all other values limited to [0,
    limit].

    The limit is `factor` times the median of the values above zero, and at most 10^9. To change
    this median, more than half of the clients would have to send false values.
    """
    result = np.where(np.isfinite(values) & (values >= 0), values, np.nan)
    np.minimum(
        result, LARGEST, out=result
    )  # limit first: the median may add two numbers, which must not overflow
    positive = result[result > 0]
    if len(positive):
        np.minimum(result, factor * float(np.median(positive)), out=result)
    return result
