"""Robust means, which a few extreme or hostile updates can't dominate.

Median and trimmed mean: Yin et al. 2018, Definitions 1 and 2. Norm clipping: Sun et al. 2019, §4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, PositiveFloat

from potluck.server.strategies.averaging import Averaging, shares
from potluck.server.strategy import Combine, Reduction, Statistic, UpdateStatistics


class _Robust(Averaging):
    """Base class of the three robust strategies. They read single updates, which a secure sum would
    hide."""

    individual = True


class CoordinateMedian(_Robust):
    """Takes the median of each coordinate over the updates. Numbers of samples have no effect."""

    by_samples = False

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the median of each coordinate of the updates."""
        return Combine(weights=shares(statistics.samples), reduction=Reduction.MEDIAN)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(_Robust):
    """Averages each coordinate, unweighted, without its smallest and largest values.

    trim in [0, 0.5): share of the updates cut at each end, rounded down to whole updates. The
    result tolerates this number of bad updates.
    """

    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1

    by_samples = False

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean of each coordinate, without the smallest and the largest values."""
        return Combine(
            weights=shares(statistics.samples), reduction=Reduction.TRIMMED_MEAN, trim=self.trim
        )


@dataclass(frozen=True, kw_only=True)
class NormClippedMean(_Robust):
    """Averages the updates, weighted by samples, after scaling long updates down to `clip`.

    clip > 0: maximum L2 distance from the model, over all floating-point tensors.
    """

    clip: PositiveFloat = 10.0

    needs = frozenset({Statistic.NORMS})

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the mean of the clipped updates, weighted by samples."""
        return Combine(
            weights=shares(statistics.samples), reduction=Reduction.CLIPPED_MEAN, clip=self.clip
        )
