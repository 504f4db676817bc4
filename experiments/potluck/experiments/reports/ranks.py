"""Mean ranks of arms over many comparisons, with the tests of Friedman and Nemenyi.

J. Demšar: Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006.

SciPy computes Friedman's test, scikit-posthocs Nemenyi's, statsmodels Holm's correction. None of
them has a function for the critical difference, which the tables print.
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
    the 5 % level. The difference is None for fewer than two arms or blocks. behind: p value of
    Nemenyi's test of each arm against the first one; empty for fewer than two arms or blocks.
    """

    means: Mapping[str, float]
    blocks: int
    p: float | None
    difference: float | None
    behind: Mapping[str, float]

    @property
    def best(self) -> tuple[str, ...]:
        """The first arm and all arms not significantly different from it; empty if unknown.

        If Friedman's test finds no significant difference between arms, all arms are included.
        """
        if not self.behind:
            return ()
        if self.p is not None and self.p > LEVEL:
            return tuple(self.means)
        return tuple(arm for arm, p in self.behind.items() if p >= LEVEL)


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
    against = _nemenyi(ranks, order[0])
    return Ranks(
        means={arms[column]: float(means[column]) for column in order},
        blocks=len(blocks),
        p=_friedman(ranks),
        difference=critical_difference(len(arms), len(blocks)),
        behind={arms[column]: against[column] for column in order} if against else {},
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


def _nemenyi(ranks: np.ndarray, first: int) -> Sequence[float]:
    """Return the p values of Nemenyi's test of each column against this one, 1 for itself; none for
    fewer than two columns or rows. ranks: blocks × arms."""
    blocks, arms = ranks.shape
    if arms < 2 or blocks < 2:
        return ()
    from scikit_posthocs import posthoc_nemenyi_friedman  # slow: imports pandas and statsmodels

    found: list[float] = posthoc_nemenyi_friedman(ranks).iloc[first].tolist()
    return found


def holm(values: Mapping[Name, float | None]) -> dict[Name, float]:
    """Return the p values of several comparisons after Holm's correction, by name, the smallest
    first.

    values: p by name; None for a comparison that no test is possible for, which counts as one of
    the comparisons, and gets no p.
    """
    known = sorted((p, place) for place, p in enumerate(values.values()) if p is not None)
    if not known:
        return {}
    from statsmodels.stats.multitest import multipletests  # slow: imports pandas

    untested = [1.0] * (len(values) - len(known))
    corrected = np.asarray(multipletests([p for p, _ in known] + untested, method="holm")[1])
    names = list(values)
    return {names[place]: p for (_, place), p in zip(known, corrected.tolist(), strict=False)}
