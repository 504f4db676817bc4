"""Mean ranks of arms over many comparisons, with Friedman's test and Nemenyi's critical difference.

J. Demšar: Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006.

scikit-posthocs finds the same pairs, as a test shows with its values. It is not used, since it has
no function for the critical difference, which the tables print.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

LEVEL = 0.05

_DIGITS = 9
"""Number of decimals of a value that count in its rank. Rounding errors would break ties."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Arms by their mean rank, the best first; 1 is the best in every block.

    blocks: number of comparisons. p: p value of Friedman's test that all arms are equal; None if
    the test is impossible (fewer than three arms or two blocks, or all ranks tied). difference: the
    critical difference (Nemenyi). Mean ranks that differ by less are not significantly different at
    the 5 % level. The difference is None for fewer than two arms or blocks.
    """

    means: Mapping[str, float]
    blocks: int
    p: float | None
    difference: float | None

    @property
    def best(self) -> tuple[str, ...]:
        """The first arm and all arms not significantly different from it; empty if unknown.

        If Friedman's test finds no significant difference between arms, all arms are included.
        """
        if self.difference is None:
            return ()
        if self.p is not None and self.p > LEVEL:
            return tuple(self.means)
        least = min(self.means.values(), default=math.nan)
        return tuple(arm for arm, mean in self.means.items() if mean - least <= self.difference)


def mean_ranks(blocks: Sequence[Mapping[str, float]], *, lower: bool = False) -> Ranks | None:
    """Return ranks of the arms that have a value in every block; None if no arm has.

    blocks: one mapping per comparison, with values by arm; NaN is the worst. lower: True if less is
    better. Equal values, to nine decimals, share the mean of their ranks.
    """
    arms = [arm for arm in (blocks[0] if blocks else ()) if all(arm in each for each in blocks)]
    if not arms:
        return None
    table = np.array([[each[arm] for arm in arms] for each in blocks], dtype=np.float64)
    table = table.round(_DIGITS)
    losses = np.where(np.isnan(table), np.inf, table if lower else -table)
    ranks = stats.rankdata(losses, axis=1)
    means = ranks.mean(axis=0)
    order = sorted(range(len(arms)), key=lambda column: (means[column], column))
    return Ranks(
        means={arms[column]: float(means[column]) for column in order},
        blocks=len(blocks),
        p=_friedman(ranks),
        difference=critical_difference(len(arms), len(blocks)),
    )


def critical_difference(arms: int, blocks: int) -> float | None:
    """Return Nemenyi's critical difference at the 5 % level: q √(k (k + 1) / 6N).

    k: arms. N: blocks. q: quantile of the studentized range over √2.

    None for fewer than two arms or blocks.
    """
    if arms < 2 or blocks < 2:
        return None
    q = float(stats.studentized_range.ppf(1 - LEVEL, arms, np.inf)) / math.sqrt(2)
    return q * math.sqrt(arms * (arms + 1) / (6 * blocks))


def _friedman(ranks: np.ndarray) -> float | None:
    blocks, arms = ranks.shape
    if arms < 3 or blocks < 2 or bool((np.ptp(ranks, axis=1) == 0).all()):
        return None
    return float(stats.friedmanchisquare(*ranks.T).pvalue)


def holm(values: Mapping[Name, float | None]) -> dict[Name, float]:
    """Return the p values of several comparisons after Holm's correction, by name.

    values: p by name; None for a comparison that no test is possible for, which counts as one of
    the comparisons, and gets no p.
    """
    known = [(name, p) for name, p in values.items() if p is not None]
    corrected: dict[Name, float] = {}
    largest = 0.0
    for place, (name, p) in enumerate(sorted(known, key=lambda each: each[1])):
        largest = max(largest, min(1.0, (len(values) - place) * p))
        corrected[name] = largest
    return corrected
