"""Krum, Multi-Krum and Bulyan: use the updates that are nearest to their neighbours.

Krum and Multi-Krum: Blanchard et al. 2017, §4 and §5. Bulyan: El Mhamdi et al. 2018, §4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from potluck.common.errors import PluginError
from potluck.server.strategies.averaging import Averaging
from potluck.server.strategy import Combine, Reduction, Statistic, UpdateStatistics

Doubles = NDArray[np.float64]
HostileShare = Annotated[float, Field(ge=0, lt=0.5)]
"""Share of a round's updates that may be hostile."""

_SAME: Final = 1e-12
"""Squared distances up to this share of the two updates' squared norms count as 0, because they may
be rounding errors."""
_DIGITS: Final = 9
"""Number of significant digits to which scores are rounded before they are compared."""


class _ByDistance(Averaging):
    """Base class of strategies that compare the distances between all pairs of updates."""

    needs = frozenset({Statistic.GRAM})
    individual = True
    by_samples = False


@dataclass(frozen=True, kw_only=True)
class MultiKrum(_ByDistance):
    """Averages the updates with the smallest sums of squared distances to their neighbours.

    With n updates of which f may be hostile, the score of an update is the sum of its squared
    distances to the n − f − 2 nearest others. hostile: f as a share of n, rounded down to whole
    updates; f is at most (n − 3) / 2, so that n ≥ 2f + 3. kept: number of updates with the smallest
    scores that are averaged, without weights; 0 for n − f. Of equal scores, the client that comes
    first by name is kept.
    """

    hostile: HostileShare = 0.2
    kept: NonNegativeInt = 0

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the unweighted mean of the updates with the smallest scores."""
        count = len(statistics.clients)
        hostile = most_hostile(count, self.hostile, least=3, each=2)
        best = by_score(squared_distances(statistics), hostile, statistics.clients)
        return _mean_of(best[: self.kept or count - hostile], count)


@dataclass(frozen=True, kw_only=True)
class Krum(_ByDistance):
    """Uses the one update with the smallest sum of squared distances to its neighbours.

    hostile: as in `MultiKrum`. The next model is the model of this one client.
    """

    hostile: HostileShare = 0.2

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request the one update with the smallest score."""
        return MultiKrum(hostile=self.hostile, kept=1).weigh(statistics)


@dataclass(frozen=True, kw_only=True)
class Bulyan(_ByDistance):
    """Selects updates with Krum one after another, then averages each coordinate near its median.

    With n updates of which f may be hostile, n − 2f are selected: Krum's update is selected and
    removed, and Krum is applied to the rest. For each coordinate, the n − 4f selected values that
    are nearest to their median are averaged, without weights. hostile: f as a share of n, rounded
    down to whole updates; f is at most (n − 3) / 4, so that n ≥ 4f + 3.
    """

    hostile: Annotated[float, Field(ge=0, lt=0.25)] = 0.1

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Request, for each coordinate, the mean of the selected updates' values nearest to their
        median."""
        count = len(statistics.clients)
        hostile = most_hostile(count, self.hostile, least=3, each=4)
        distances = squared_distances(statistics)
        left = list(range(count))
        weights = np.zeros(count)
        for _ in range(count - 2 * hostile):
            clients = [statistics.clients[place] for place in left]
            best = by_score(distances[np.ix_(left, left)], hostile, clients)[0]
            weights[left.pop(int(best))] = 1.0
        return Combine(
            weights=weights, reduction=Reduction.NEAR_MEDIAN, nearest=count - 4 * hostile
        )


def most_hostile(updates: int, share: float, *, least: int, each: int) -> int:
    """Return f, the number of hostile updates to expect: a share of the updates, rounded down.

    f is at most (updates − least) / each.
    """
    # 0.29 · 100 is slightly below 29 in floating point, and must give 29.
    return max(0, min(math.floor(share * updates + 1e-9), (updates - least) // each))


def squared_distances(statistics: UpdateStatistics) -> Doubles:
    """Return ‖u_i − u_j‖² for all pairs of updates, n × n; exactly 0 for equal updates."""
    gram = statistics.gram
    if gram is None:
        raise PluginError("the strategy needs the inner products of the updates")
    squares = np.diagonal(gram)
    sums = squares[:, None] + squares[None, :]
    distances = sums - gram - gram.T
    return np.asarray(np.where(distances > _SAME * sums, distances, 0.0))


def scores(distances: Doubles, hostile: int) -> Doubles:
    """Return Krum's score of each update: the sum of its n − f − 2 smallest squared distances.

    distances: n × n. hostile: f. At least one neighbour is counted, if there is one.
    """
    count = len(distances)
    neighbours = max(1, count - hostile - 2)
    apart = distances.copy()
    np.fill_diagonal(apart, np.inf)  # an update is not its own neighbour
    nearest = np.sort(apart, axis=1)[:, : min(neighbours, count - 1)]
    return np.asarray(nearest.sum(axis=1))


def by_score(distances: Doubles, hostile: int, clients: Sequence[str]) -> NDArray[np.int64]:
    """Return the positions of the updates by ascending score; updates with equal scores in order of
    the clients' names."""
    found = scores(distances, hostile)
    exponents = np.floor(np.log10(found, out=np.zeros(len(found)), where=found > 0))
    units = 10.0 ** (exponents - _DIGITS + 1)
    return np.lexsort((np.array(clients), np.round(found / units) * units))


def _mean_of(places: NDArray[np.int64], updates: int) -> Combine:
    weights = np.zeros(updates)
    weights[places] = 1.0 / len(places)
    return Combine(weights=weights)
