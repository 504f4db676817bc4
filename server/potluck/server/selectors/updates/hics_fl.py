"""HiCS-FL: the more even a client's labels seem, by how it moves the last layer, the more often.

Chen & Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
Learning", NeurIPS 2024 (ALGORITHMS §8.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

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
from potluck.server.selectors.parts.choosing import Cohort, samples_or_mean, weighted
from potluck.server.selectors.updates.clustered_sampling import by_similarity, fill
from potluck.server.selectors.updates.update_memory import (
    LIMIT,
    angles,
    check_size,
    nothing,
    of_rows,
    remembered,
    sweep,
    ward,
)
from potluck.server.state import State


@dataclass(frozen=True, kw_only=True)
class HiCSFL(Selector):
    """Clusters of clients by how they move the output layer, drawn by the evenness of their labels.

    Ĥ is the entropy in nats of softmax(Δb/temperature), Δb the last move of the output layer's bias
    (of the row means of its weights, where it has none). Clients are clustered by Ward's method
    into `clusters` (as many as are chosen, if not given), by the angle of two Δb plus
    entropy_weight times the difference of their Ĥ. A place of the cohort goes to a cluster, drawn
    with probability ∝ exp(annealing · (1 − t/T) · its mean Ĥ), T being the run's rounds, and there
    to one of its clients, uniformly. Where Ĥ varies by spread or more, places are drawn as by
    Algorithm 2 of clustered sampling instead. Clients that were never picked go first, drawn
    uniformly; those that were, and of which no update is known, last. O(K²), for up to 3,000
    clients.
    """

    temperature: PositiveFloat = 0.0025
    entropy_weight: NonNegativeFloat = 10.0
    annealing: NonNegativeFloat = 4.0
    spread: NonNegativeFloat = 0.1
    clusters: PositiveInt | None = None

    learns = frozenset({UpdateFact.OUTPUT_MOVE})
    most_clients = LIMIT

    def init(self, population: Population) -> State:
        """State: who was picked, and each client's last move."""
        return State(arrays=nothing(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """First whom nobody has picked, then by clusters."""
        check_size("hics-fl", context)
        generator = context.generator("hics-fl")
        cohort = Cohort(context, generator)
        sweep(cohort, state.arrays, context)
        rows = generator.permutation(context.available)  # equals come in random order
        known, moves = of_rows(state.arrays, rows)
        rows = rows[known]
        free = ~np.isin(rows, cohort.rows)
        rows, moves = rows[free], moves[free]
        if cohort.missing and len(rows) > cohort.missing:
            self._draw(cohort, rows, moves, context, generator)
        elif len(rows):
            cohort.draw(cohort.missing, "no others are left", rows)
        cohort.draw(cohort.missing, "no update known; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Keep the moves."""
        found = np.zeros((0, 0)) if outcome.facts is None else outcome.facts.output_moves
        return State(arrays=remembered(state.arrays, outcome, found))

    def _draw(
        self,
        cohort: Cohort,
        rows: Rows,
        moves: Floats,
        context: SelectionContext,
        generator: np.random.Generator,
    ) -> None:
        entropies = label_entropies(moves, self.temperature)
        if entropies.var() >= self.spread:
            samples = samples_or_mean(context.population, rows)
            masses = cohort.missing * samples / samples.sum()
            places = by_similarity(angles(moves), masses, cohort.missing)
            fill(cohort, rows, samples, places, generator)
            return
        apart = angles(moves) + self.entropy_weight * np.abs(entropies[:, None] - entropies)
        labels = cut(ward(apart), min(self.clusters or cohort.missing, len(rows)))
        means = np.bincount(labels, entropies) / np.bincount(labels)
        left = 1 - context.round / context.rounds if context.rounds else 1.0
        shares = np.exp(self.annealing * max(0.0, left) * (means - means.max()))
        chosen = np.zeros(len(rows), dtype=bool)
        for _ in range(cohort.missing):
            sizes = np.bincount(labels[~chosen], minlength=len(means))
            cluster = weighted(np.where(sizes > 0, shares, 0.0), generator)
            if cluster is None:  # shares so small that they are 0
                cluster = int(sizes.argmax())
            members = np.flatnonzero((labels == cluster) & ~chosen)
            position = int(members[generator.integers(len(members))])
            chosen[position] = True
            of = f"cluster {cluster + 1} of {len(means)}"
            cohort.add(int(rows[position]), f"{of}, label entropy {entropies[position]:.2f}")


def label_entropies(moves: Floats, temperature: float) -> Floats:
    """Ĥ of each row, in nats in [0, ln C]."""
    with np.errstate(over="ignore"):
        scaled = np.clip(moves / temperature, -1e300, 1e300)
    weights = np.exp(scaled - scaled.max(axis=1, initial=-math.inf, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    logarithms = np.log(np.where(shares > 0, shares, 1.0))
    entropies: Floats = np.abs((shares * logarithms).sum(axis=1))
    return entropies


def cut(merges: Floats, clusters: int) -> Rows:
    """The cluster of each client, from 0, where so many are left of the tree."""
    clients = len(merges) + 1
    parents = np.arange(clients + len(merges))
    for number, (one, other) in enumerate(merges[: clients - clusters, :2].astype(np.int64)):
        parents[one] = parents[other] = clients + number
    roots = parents[:clients]
    while (parents[roots] != roots).any():
        roots = parents[roots]
    labels: Rows = np.unique(roots, return_inverse=True)[1].astype(np.int64)
    return labels
