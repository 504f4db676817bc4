"""Steps that second implementations of selectors share, in plain loops."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def limited(values: Mapping[int, float], factor: float) -> dict[int, float]:
    """Return the finite values ≥ 0, limited to `factor` times the median of those above 0."""
    valid = {key: value for key, value in values.items() if math.isfinite(value) and value >= 0}
    positive = [value for value in valid.values() if value > 0]
    limit = factor * statistics.median(positive) if positive else math.inf
    return {key: min(value, limit) for key, value in valid.items()}


def position_at(weights: Sequence[float], share: float) -> int:
    """Return the position that contains this share, in [0, 1), of the sum of the weights."""
    end, place = 0.0, share * sum(weights)
    for position, weight in enumerate(weights):
        end += weight
        if end > place:
            return position
    raise AssertionError("all weights are 0")
