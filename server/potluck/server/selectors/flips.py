"""FLIPS: clusters of clients with similar labels take turns.

Bhope, Jayaram, Venkatasubramanian, Verma and Thomas, "FLIPS: Federated Learning using Intelligent
Participant Selection", Middleware 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    Signal,
)
from potluck.server.selectors.parts.choosing import Cohort, disclosed, profiles
from potluck.server.selectors.parts.k_means import k_means, nearest
from potluck.server.selectors.parts.parallel import passes
from potluck.server.selectors.parts.selection_counts import counted, no_selections, selections_of
from potluck.server.state import State

_MOST_POINTS = 1_000
"""Maximum number of clients from which cluster centres are computed. If there are more, an evenly
spaced sample of them is used."""
_MOST_CLUSTERS = 20
"""Maximum number of clusters that is tried if the run file sets no number."""


@dataclass(frozen=True, kw_only=True)
class Flips(Selector):
    """Clusters clients by labels; selects from the clusters in turn.

    Every cluster gets the same number of places if it has enough clients. The clusters whose
    clients were selected least often so far get the remaining places. In its turn, a cluster adds
    its client that was selected least often. Ties are broken at random. The last places, as many as
    `round.over_selection` adds, go to the clusters with clients that failed or came too late in the
    last round, if there are any.

    clusters: number of k-means clusters of label distributions. By default, the number from 2 to 20
    with the smallest Davies–Bouldin index. Clients without samples or without a profile come last.
    O(K · clusters).
    """

    clusters: Annotated[int, Field(ge=1, le=1000)] | None = None

    needs_profiles = frozenset({Signal.LABEL_COUNTS})

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected. failed: rows that failed or came too late
        in the last round."""
        return State(arrays={**no_selections(len(population)), "failed": np.zeros(0, np.int64)})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the cohort, in the order in which the clusters took turns."""
        generator = context.generator("flips")
        cohort = Cohort(context, generator)
        selections = selections_of(state, len(context.population))
        cluster = clusters_of(context.population, self.clusters)
        rows = generator.permutation(context.available)  # so that ties are in random order
        rows = rows[cluster[rows] >= 0]
        if cohort.size and len(rows):
            turns = Turns(
                cluster=cluster,
                rows=rows[np.lexsort((selections[rows], cluster[rows]))],
                selections=selections,
                generator=generator,
            )
            _fill(cohort, turns, context.spares, _troubled(state, cluster))
        cohort.draw(cohort.missing, "no label counts; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Count the selections of this round's cohort, and store which of its clients failed."""
        failed = np.setdiff1d(outcome.selected, outcome.included)
        return State(arrays={**counted(state, outcome), "failed": failed.astype(np.int64)})


class Turns:
    """Gives clusters places in the cohort, in turn.

    cluster: K, number of each client's cluster, −1 if unknown. rows: available clients, sorted by
    cluster; within a cluster, in the order in which they get places. selections: K, earlier
    selections of each client.
    """

    def __init__(
        self,
        *,
        cluster: NDArray[np.int64],
        rows: Rows,
        selections: NDArray[np.int64],
        generator: np.random.Generator,
    ) -> None:
        known = cluster >= 0
        count = int(cluster.max()) + 1
        self.count = count
        self._edges = np.searchsorted(cluster[rows], np.arange(count + 1))
        self._rows = rows
        self._past = np.bincount(cluster[known], weights=selections[known], minlength=count)
        self._tie = generator.random(count)
        self._places = np.zeros(count, dtype=np.int64)

    def next(self, among: NDArray[np.int64] | None = None) -> tuple[int, int] | None:
        """Return the next client and its cluster; None if no client is left.

        among: numbers of the clusters that take part; None for all.
        """
        have = np.flatnonzero(self._edges[:-1] + self._places < self._edges[1:])
        if among is not None:
            have = have[np.isin(have, among)]
        if not len(have):
            return None
        order = np.lexsort((self._tie[have], self._past[have], self._places[have]))
        chosen = int(have[order[0]])
        row = int(self._rows[self._edges[chosen] + self._places[chosen]])
        self._places[chosen] += 1
        return row, chosen


def _fill(cohort: Cohort, turns: Turns, spares: int, troubled: NDArray[np.int64]) -> None:
    """Fill the cohort with clients of the clusters in turn. spares: number of last places for
    clusters with failed clients."""
    for place in range(cohort.size):
        for_failed = place >= cohort.size - spares and len(troubled) > 0
        found = turns.next(troubled) if for_failed else None
        reason = "cluster {} of {}, where clients were missing in the last round"
        if found is None:
            found, reason = turns.next(), "cluster {} of {}, in turn"
        if found is None:
            return
        row, cluster = found
        cohort.add(row, reason.format(cluster + 1, turns.count))


def _troubled(state: State, cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the clusters of the clients that failed in the last round."""
    failed = state.arrays["failed"]
    found = np.unique(cluster[failed[failed < len(cluster)]])
    clusters: NDArray[np.int64] = found[found >= 0]
    return clusters


def clusters_of(population: Population, clusters: int | None) -> NDArray[np.int64]:
    """Return each client's cluster, from 0; −1 if the client's labels are unknown.

    clusters: number of clusters; None to choose it. Clusters change only with the labels.
    """
    found = np.full(len(population), -1, dtype=np.int64)
    table = population.label_counts
    rows = disclosed(table, np.arange(len(population)))
    if table is None or not len(rows):
        return found
    counts = profiles(table, rows).clip(min=0.0)
    sizes = counts.sum(axis=1)
    rows, counts, sizes = rows[sizes > 0], counts[sizes > 0], sizes[sizes > 0]
    if not len(rows):
        return found
    sample = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_POINTS)).astype(np.int64)
    shares = np.ascontiguousarray(counts[sample] / sizes[sample, None])
    centres = _centres(shares.tobytes(), shares.shape[1], clusters)
    joined = np.empty(len(rows), dtype=np.int64)

    def join(start: int, stop: int) -> None:
        joined[start:stop] = nearest(counts[start:stop] / sizes[start:stop, None], centres)

    with passes(len(rows)) as run:
        run(join)
    found[rows] = joined
    return found


@lru_cache(maxsize=4)
def _centres(shares: bytes, classes: int, clusters: int | None) -> Floats:
    """Return the centres of label distributions. shares: bytes of n × classes doubles, which can be
    a cache's key; each round needs the same centres."""
    points = np.frombuffer(shares).reshape(-1, classes)
    if clusters is not None:
        return k_means(points, clusters)
    best: Floats = points.mean(axis=0)[None]
    least = np.inf
    for count in range(2, 1 + min(_MOST_CLUSTERS, len(points))):
        centres = k_means(points, count)
        index = davies_bouldin(points, centres)
        if index < least:
            best, least = centres, index
        if len(centres) < count:
            break
    return best


def davies_bouldin(points: Floats, centres: Floats) -> float:
    """Return the Davies–Bouldin index: the mean over clusters of the largest (s_i + s_j) / d_ij.

    s: mean distance of a cluster's points to its centre; d: distance of two centres. Infinite if
    there are fewer than two clusters. Smaller is better.
    """
    label = nearest(points, centres)
    used, label = np.unique(label, return_inverse=True)
    if len(used) < 2:
        return np.inf
    centres = centres[used]
    away = np.linalg.norm(points - centres[label], axis=1)
    spread = np.bincount(label, weights=away) / np.bincount(label)
    apart = np.linalg.norm(centres[:, None] - centres, axis=2)
    np.fill_diagonal(apart, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.nan_to_num((spread[:, None] + spread) / apart, nan=np.inf)
    return float(ratios.max(axis=1).mean())
