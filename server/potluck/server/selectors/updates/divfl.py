"""DivFL: selects clients whose updates together represent the updates of all clients.

Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular Maximization",
ICLR 2022.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
)
from potluck.server.selectors.parts.choosing import Cohort, largest
from potluck.server.selectors.updates.update_memory import (
    LIMIT,
    check_size,
    nothing,
    of_rows,
    remembered,
    sweep,
)
from potluck.server.state import State


@dataclass(kw_only=True)
class DivFL(Selector):
    """Selects clients whose updates together represent all updates best.

    Greedily adds the client that lowers G(S) = Σ_i min_{j∈S} ‖g_i − g_j‖ most. g are random
    projections of the clients' last updates; i runs over all clients with a known update, j over
    the available ones. Clients that were never picked come first, drawn uniformly; picked clients
    without a known update come last. weighted: True to weight an update by the number of clients to
    which it is the nearest, instead of by its samples. O(K²), for up to 3,000 clients.
    """

    weighted: bool = False

    needs_facts = frozenset({UpdateFact.SKETCH})
    most_clients = LIMIT

    def __post_init__(self) -> None:
        self.sets_weights = self.weighted

    def init(self, population: Population) -> State:
        """Return the initial state: the number of picks and a sketch of the last update of each
        client."""
        return State(arrays=nothing(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Select never-picked clients first, then other clients greedily."""
        check_size("divfl", context)
        generator = context.generator("divfl")
        cohort = Cohort(context, generator)
        sweep(cohort, state.arrays, context)
        seen = state.arrays["seen"]
        if cohort.missing and len(seen):
            able = np.flatnonzero(np.isin(seen, context.available))
            _, vectors = of_rows(state.arrays, seen)
            chosen, reached = greedy(distances(vectors), able, cohort.missing, generator)
            reasons = [f"all updates within {distance:.3g} in sum" for distance in reached]
            cohort.extend(seen[chosen].tolist(), reasons)
        cohort.draw(cohort.missing, "no update known; drawn uniformly")
        selection = cohort.selection()
        if not self.weighted:
            return selection
        return Selection(
            rows=selection.rows,
            reasons=selection.reasons,
            weights=self._represented(state, selection.rows),
        )

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the sketches of the round's updates."""
        found = np.zeros((0, 0)) if outcome.facts is None else outcome.facts.sketches
        return State(arrays=remembered(state.arrays, outcome, found))

    def _represented(self, state: State, rows: Rows) -> Floats:
        """Return, for each row, the number of clients to which its update is the nearest; 1 if its
        update is unknown."""
        known, _ = of_rows(state.arrays, rows)
        weights = np.ones(len(rows))
        if known.any():
            _, vectors = of_rows(state.arrays, state.arrays["seen"])
            places = np.searchsorted(state.arrays["seen"], rows[known])
            nearest = distances(vectors)[:, places].argmin(axis=1)
            weights[known] = np.maximum(np.bincount(nearest, minlength=len(places)), 1)
        return weights


def distances(vectors: Floats) -> Floats:
    """Return the n × n Euclidean distances between rows. Distances that overflow become the largest
    double."""
    scale = np.abs(vectors).max(initial=0.0)
    scaled = vectors / scale if scale > 0 else vectors
    squares = (scaled**2).sum(axis=1)
    found = scaled @ scaled.T
    found *= -2
    found += squares[:, None]
    found += squares
    np.maximum(found, 0.0, out=found)
    np.sqrt(found, out=found)
    np.fill_diagonal(found, 0.0)
    with np.errstate(over="ignore"):
        found *= max(scale, 1e-300)
    result: Floats = np.minimum(found, np.finfo(np.float64).max / max(1, 2 * len(found)))
    return result


def greedy(
    apart: Floats, able: Rows, count: int, generator: np.random.Generator
) -> tuple[Rows, list[float]]:
    """Return up to `count` positions among `able`, and the objective G of `DivFL` after each
    choice. apart: distances, n × n.

    Gains are computed lazily: a client's gain can only fall when other clients are chosen, so it is
    computed again only if it is the largest.
    """
    nearest = np.full(len(apart), np.inf)
    chosen: list[int] = []
    reached: list[float] = []
    if not count or not len(able):
        return np.zeros(0, dtype=np.int64), reached
    first = int(able[largest(-apart[:, able].sum(axis=0), generator)])
    ties = generator.permutation(len(apart)).tolist()
    queue: list[tuple[float, int, int]] = []
    position = first
    while True:
        chosen.append(position)
        nearest = np.minimum(nearest, apart[:, position])
        reached.append(float(nearest.sum()))
        if len(chosen) == min(count, len(able)):
            return np.array(chosen, dtype=np.int64), reached
        if len(chosen) == 1:
            gains = np.maximum(nearest[:, None] - apart[:, able], 0.0).sum(axis=0).tolist()
            queue = [
                (-gain, ties[each], each)
                for gain, each in zip(gains, able.tolist(), strict=True)
                if each != first
            ]
            heapq.heapify(queue)
        while True:
            _, tie, position = heapq.heappop(queue)
            gain = float(np.maximum(nearest - apart[:, position], 0.0).sum())
            if not queue or (-gain, tie) <= queue[0][:2]:
                break
            heapq.heappush(queue, (-gain, tie, position))
