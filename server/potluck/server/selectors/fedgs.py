"""FedGS: selects clients far apart in a graph of label similarities, and those selected rarely.

Wang, Fan, Qi, Jin, Yang, Shen and Wang, "FedGS: Federated Graph-Based Sampling with Arbitrary
Client Availability", AAAI 2023. The graph is the data-distribution-dependency graph (3DG). Details
follow the authors' program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

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
from potluck.server.selectors.parts.choosing import TIE, Cohort, disclosed, profiles
from potluck.server.selectors.parts.selection_counts import counted, no_selections, selections_of
from potluck.server.selectors.updates.update_memory import check_size
from potluck.server.state import State

LIMIT: Final = 1_000
"""Maximum number of clients between which shortest paths are computed; that takes a few seconds."""
_SWAPS = 1_000
"""Maximum number of swaps of the local search."""


@dataclass(frozen=True, kw_only=True)
class FedGS(Selector):
    """Selects clients with different labels, and clients that were rarely selected.

    Maximises α · mean of h_ij over the pairs of the cohort − Σ z_i over its clients, by a local
    search. h: length of the shortest path in the 3DG, divided by the largest; 1 without a
    path. Clients i and j have an edge of length exp(−V² / width) if V > threshold. V: cosine of
    their label distributions, divided by the largest such cosine. z = (2 (v − mean v − M / N) + 1)
    / (K − 1). v: number of earlier selections; M: size of the cohort; N: number of available
    clients.

    alpha: α; 0 selects the clients that were selected least often. The search starts greedily and
    exchanges one client for another as long as that raises the sum. Clients without samples or
    without a profile come last. O(K³) once, and O(count · K) for each exchange; for up to 1,000
    clients.
    """

    alpha: NonNegativeFloat = 0.1
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.1
    width: PositiveFloat = 0.01

    needs_profiles = frozenset({Signal.LABEL_COUNTS})
    most_clients = LIMIT

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected."""
        return State(arrays=no_selections(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the cohort, in the order of its clients' numbers of selections."""
        check_size("fedgs", context, LIMIT)
        generator = context.generator("fedgs")
        cohort = Cohort(context, generator)
        known, apart = graph(context.population, self.threshold, self.width)
        places = np.flatnonzero(np.isin(known, context.available))
        places = generator.permutation(places)  # so that ties are in random order
        size = min(cohort.size, len(places))
        if size:
            selections = selections_of(state, len(context.population))
            often = overdue(selections, size, len(context.available))[known[places]]
            distances = apart[np.ix_(places, places)]
            chosen = farthest(self.alpha * distances, often, size)
            rows = known[places[chosen]]
            order = np.argsort(selections[rows], kind="stable")
            inner = distances[np.ix_(chosen, chosen)].sum(axis=1) / max(1, size - 1)
            cohort.extend(
                rows[order].tolist(),
                [
                    f"selected {times} times before, mean distance {away:.3f} to the others"
                    for times, away in zip(selections[rows[order]], inner[order], strict=True)
                ],
            )
        cohort.draw(cohort.missing, "no label counts; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Count the selections of this round's cohort."""
        return State(arrays=counted(state, outcome))


def overdue(selections: Rows, size: int, available: int) -> Floats:
    """Return z of each client, as `FedGS` defines it: larger if the client was selected more often.

    selections: K, earlier selections. size: clients of the cohort. available: number of available
    clients.
    """
    found: Floats = 2 * (selections - selections.mean() - size / available) + 1
    return found / max(1, len(selections) - 1)


def farthest(distances: Floats, often: Floats, size: int) -> Rows:
    """Return `size` positions with a large mean distance and a small sum of `often`.

    distances: n × n, 0 on the diagonal, between the n ≥ size positions. often: n, each position's
    z. The first of equal positions is preferred.
    """
    pair = 2 / (size * (size - 1)) if size > 1 else 0.0
    inside = np.zeros(len(often), dtype=bool)
    near = np.zeros(len(often))  # pair · Σ of the distances to the chosen positions
    for _ in range(size):
        gains = np.where(inside, -np.inf, near - often)
        best = int(gains.argmax())
        inside[best] = True
        near += pair * distances[best]
    for _ in range(_SWAPS):
        out, into = np.flatnonzero(inside), np.flatnonzero(~inside)
        if not len(into):
            break
        gains = (near[into] - often[into]) - (near[out] - often[out])[:, None]
        gains -= pair * distances[np.ix_(out, into)]
        best = int(gains.argmax())
        if gains.flat[best] <= TIE:
            break
        leaves, enters = out[best // len(into)], into[best % len(into)]
        inside[leaves], inside[enters] = False, True
        near += pair * (distances[enters] - distances[leaves])
    return np.flatnonzero(inside)


def graph(population: Population, threshold: float, width: float) -> tuple[Rows, Floats]:
    """Return the rows of clients with labels, and the lengths of the shortest paths between them,
    divided by the largest."""
    table = population.label_counts
    rows = disclosed(table, np.arange(len(population)))
    if table is None or not len(rows):
        return rows[:0], np.zeros((0, 0))
    counts = profiles(table, rows).clip(min=0.0)
    has_samples = counts.sum(axis=1) > 0
    rows, counts = rows[has_samples], np.ascontiguousarray(counts[has_samples])
    return rows, _paths(counts.tobytes(), counts.shape[1], threshold, width)


@lru_cache(maxsize=2)
def _paths(counts: bytes, classes: int, threshold: float, width: float) -> Floats:
    """Return the lengths of the shortest paths. counts: bytes of n × classes doubles, which can be
    a cache's key; each round needs the same paths."""
    labels = np.frombuffer(counts).reshape(-1, classes)
    paths = shortest_paths(edges(labels, threshold, width))
    paths.flags.writeable = False
    return paths


def edges(labels: Floats, threshold: float, width: float) -> Floats:
    """Return the lengths of the edges, n × n; 0 on the diagonal, infinite if there is no edge.

    labels: n × classes, ≥ 0, no row of zeros.
    """
    unit = labels / np.linalg.norm(labels, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, 0.0)
    largest = cosines.max(initial=0.0)
    likeness = cosines / largest if largest > 0 else cosines
    with np.errstate(over="ignore", under="ignore"):
        found = np.where(likeness > threshold, np.exp(-(likeness**2) / width), np.inf)
    np.fill_diagonal(found, 0.0)
    return np.minimum(found, found.T)


def shortest_paths(lengths: Floats) -> Floats:
    """Return the lengths of the shortest paths (Floyd–Warshall), divided by the largest; 1 for
    pairs without a path."""
    found = lengths.copy()
    for middle in range(len(found)):
        np.minimum(found, found[:, middle, None] + found[middle], out=found)
    reached = np.isfinite(found)
    largest = found[reached].max(initial=0.0)
    if largest > 0:
        found /= largest
    found[~reached] = 1.0
    return found
