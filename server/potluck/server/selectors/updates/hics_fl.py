"""HiCS-FL: prefers clients whose updates of the last layer suggest even labels.

Chen & Vikalo, "Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated
Learning", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from potluck.common.learning.output_layer import label_entropies
from potluck.common.settings.extras import require
from potluck.server.selection import (
    Answers,
    Ask,
    Floats,
    Interview,
    Population,
    RoundOutcome,
    Rows,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
)
from potluck.server.selectors.parts.choosing import Cohort, samples_or_mean, weighted
from potluck.server.selectors.parts.reported import column
from potluck.server.selectors.updates.clustered_sampling import by_similarity, by_size, fill
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

_TOLD = "label-entropy"
_LARGEST = 16.0
"""Maximum accepted entropy of labels in nats; it suffices for up to eight million classes."""


@dataclass(frozen=True, kw_only=True)
class HiCSFL(Selector):
    """Clusters clients by output-layer updates; prefers clusters with even labels.

    Ĥ is the entropy in nats of softmax(Δb/temperature). Δb is the last change of the output layer's
    bias; without a bias, of the row means of its weights. Clients are clustered by Ward's method
    into `clusters` clusters (by default, as many as clients are chosen). The distance is the angle
    of two Δb plus entropy_weight times the difference of their Ĥ.

    For each place of the cohort, a cluster is drawn with probability ∝ exp(annealing · (1 − t/T) ·
    its mean Ĥ), T being the run's rounds, and then one of its clients, uniformly. If Ĥ varies by
    `spread` or more, places are drawn as by Algorithm 2 of clustered sampling instead. Clients that
    were never picked come first, drawn uniformly; picked clients whose update is unknown come last.
    O(K²), for up to 3,000 clients.

    entropies: `updates` computes Ĥ from the updates of rounds. `told` asks each client once for its
    Ĥ only, from a training whose result is discarded. Clients are then clustered by Ĥ only. If Ĥ
    varies by `spread` or more, places are drawn by samples, as by Algorithm 1 of clustered
    sampling. `told` reads nothing from updates, so it is compatible with masked ones.
    """

    temperature: PositiveFloat = 0.0025
    entropy_weight: NonNegativeFloat = 10.0
    annealing: NonNegativeFloat = 4.0
    spread: NonNegativeFloat = 0.1
    clusters: PositiveInt | None = None
    entropies: Literal["updates", "told"] = "updates"

    most_clients = LIMIT

    def __post_init__(self) -> None:
        require("scipy", "potluck[server]")
        told = self.entropies == "told"
        # The dataclass is frozen, and these class attributes depend on the options.
        object.__setattr__(self, "needs_facts", frozenset(() if told else {UpdateFact.OUTPUT_MOVE}))
        object.__setattr__(self, "asks_questions", frozenset({_TOLD} if told else ()))

    def init(self, population: Population) -> State:
        """Return the initial state: picks and each client's last update of the output bias.

        With `told`: the entropy that each client reported, NaN if none.
        """
        if self.asks_questions:
            return State(arrays={_TOLD: np.full(len(population), np.nan)})
        return State(arrays=nothing(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection | Interview:
        """Select never-picked clients first, then other clients by clusters."""
        check_size("hics-fl", context)
        return (
            self._by_told(state, context)
            if self.asks_questions
            else self._by_updates(state, context)
        )

    def _by_told(self, state: State, context: SelectionContext) -> Interview:
        generator = context.generator("hics-fl")
        cohort = Cohort(context, generator)
        told = _heard(state, (), len(context.population))
        unknown = context.available[np.isnan(told[context.available])]
        if cohort.size and len(unknown):
            parameters = {"temperature": self.temperature}
            answers = yield Ask(rows=unknown, kind=_TOLD, parameters=parameters, trains=True)
            told = _heard(state, [answers], len(context.population))
        rows = generator.permutation(context.available)
        rows = rows[~np.isnan(told[rows])]
        if cohort.missing and len(rows) > cohort.missing:
            self._draw(cohort, rows, told[rows], None, context, generator)
        elif len(rows):
            cohort.draw(cohort.missing, "no others are left", rows)
        cohort.draw(cohort.missing, "has not told its label entropy; drawn uniformly")
        return cohort.selection()

    def _by_updates(self, state: State, context: SelectionContext) -> Selection:
        generator = context.generator("hics-fl")
        cohort = Cohort(context, generator)
        sweep(cohort, state.arrays, context)
        rows = generator.permutation(context.available)  # so that ties are in random order
        known, moves = of_rows(state.arrays, rows)
        rows = rows[known]
        free = ~np.isin(rows, cohort.rows)
        rows, moves = rows[free], moves[free]
        if cohort.missing and len(rows) > cohort.missing:
            entropies = label_entropies(moves, self.temperature)
            self._draw(cohort, rows, entropies, angles(moves), context, generator)
        elif len(rows):
            cohort.draw(cohort.missing, "no others are left", rows)
        cohort.draw(cohort.missing, "no update known; drawn uniformly")
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Store the changes of the output bias, or the reported entropies."""
        if self.asks_questions:
            rows = [outcome.selected, *(answers.rows for answers in outcome.answers)]
            clients = 1 + max(int(each.max(initial=-1)) for each in rows)
            return State(arrays={_TOLD: _heard(state, outcome.answers, clients)})
        found = np.zeros((0, 0)) if outcome.facts is None else outcome.facts.output_moves
        return State(arrays=remembered(state.arrays, outcome, found))

    def _draw(
        self,
        cohort: Cohort,
        rows: Rows,
        entropies: Floats,
        directions: Floats | None,
        context: SelectionContext,
        generator: np.random.Generator,
    ) -> None:
        """Draw clients for the places of a cohort. directions: angles between the updates of all
        pairs of `rows`; None if unknown."""
        if entropies.var() >= self.spread:
            samples = samples_or_mean(context.population, rows)
            masses = cohort.missing * samples / samples.sum()
            if directions is None:
                places = by_size(masses, cohort.missing)
            else:
                places = by_similarity(directions, masses, cohort.missing)
            fill(cohort, rows, samples, places, generator)
            return
        apart = self.entropy_weight * np.abs(entropies[:, None] - entropies)
        if directions is not None:
            apart = directions + apart
        labels = cut(ward(apart), min(self.clusters or context.count, len(rows)))
        means = np.bincount(labels, entropies) / np.bincount(labels)
        left = 1 - context.round / context.rounds if context.rounds else 1.0
        shares = np.exp(self.annealing * max(0.0, left) * (means - means.max()))
        chosen = np.zeros(len(rows), dtype=bool)
        for _ in range(cohort.missing):
            sizes = np.bincount(labels[~chosen], minlength=len(means))
            cluster = weighted(np.where(sizes > 0, shares, 0.0), generator)
            if cluster is None:  # all shares have underflowed to 0, so no cluster can be drawn
                cluster = int(sizes.argmax())
            members = np.flatnonzero((labels == cluster) & ~chosen)
            position = int(members[generator.integers(len(members))])
            chosen[position] = True
            of = f"cluster {cluster + 1} of {len(means)}"
            cohort.add(int(rows[position]), f"{of}, label entropy {entropies[position]:.2f}")


def _heard(state: State, heard: Sequence[Answers], clients: int) -> Floats:
    """Return the last entropy that each client reported, NaN if none; also for clients that have
    joined since the last round."""
    before = state.arrays[_TOLD]
    told = np.append(before, np.full(max(0, clients - len(before)), np.nan))
    for answers in heard:
        values = column(answers, _TOLD, len(told))
        sound = np.isfinite(values) & (values >= 0)
        told[sound] = np.minimum(values[sound], _LARGEST)
    return told


def cut(merges: Floats, clusters: int) -> Rows:
    """Cut a tree of merges, in SciPy's format, into `clusters` clusters; return each client's
    cluster, from 0."""
    clients = len(merges) + 1
    parents = np.arange(clients + len(merges))
    for number, (one, other) in enumerate(merges[: clients - clusters, :2].astype(np.int64)):
        parents[one] = parents[other] = clients + number
    roots = parents[:clients]
    while (parents[roots] != roots).any():
        roots = parents[roots]
    labels: Rows = np.unique(roots, return_inverse=True)[1].astype(np.int64)
    return labels
