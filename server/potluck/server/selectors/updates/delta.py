"""DELTA: draws clients whose updates are long and differ from the others'.

Wang, Lin and Chen, "DELTA: Diverse Client Sampling for Fasting Federated Learning", NeurIPS 2023.
The probabilities are those of the practical variant in the authors' program, which needs no
gradients of clients that did not train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from potluck.server.selection import (
    Floats,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
    UpdateFact,
    UpdateFacts,
)
from potluck.server.selectors.parts.choosing import (
    Cohort,
    all_samples,
    draw_weighted,
    relative_samples,
)
from potluck.server.state import State

_LEAST = 1e-6
"""Minimum probability of a client, as a multiple of the mean; at 0 it would never be drawn
again."""


@dataclass(kw_only=True)
class Delta(Selector):
    """Draws clients with large and unusual updates more often.

    Draws the cohort without replacement, client k with probability ∝ P_k; at first all P are equal.
    After a round, the clients whose updates arrived share the sum of their P in proportion to n_k
    ((1 − β) ‖g_k‖ + β ‖g_k − ḡ‖). n_k: samples; g_k: update per step; ḡ: mean of these g. All
    other clients keep their P.

    diversity: β. weights: weights of the updates. `inverse` weights by n_k / P_k, so that clients
    drawn often don't count more; numbers of samples that are not known yet are replaced by the
    mean. `samples` is for strategies and sums that accept no weights from a selector. Late joiners
    start with the mean P. O(K) and one pass over the updates, of O(cohort² · parameters).
    """

    diversity: Annotated[float, Field(ge=0, le=1)] = 0.5
    weights: Literal["inverse", "samples"] = "inverse"

    needs_facts = frozenset({UpdateFact.GRAM})

    def __post_init__(self) -> None:
        self.sets_weights = self.weights == "inverse"

    def init(self, population: Population) -> State:
        """Return a state in which all clients have the same probability."""
        return State(arrays={"chances": np.ones(len(population))})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return a cohort, drawn by the probabilities."""
        generator = context.generator("delta")
        cohort = Cohort(context, generator)
        chances = _grown(state.arrays["chances"], len(context.population))[context.available]
        drawn = draw_weighted(chances, cohort.size, generator)
        reasons = [f"drawn with {factor:.3g} of an equal share" for factor in chances[drawn]]
        cohort.extend(context.available[drawn].tolist(), reasons)
        selection = cohort.selection()
        if not self.sets_weights:
            return selection
        samples = all_samples(context.population)[selection.rows]
        if len(drawn) == len(context.available):  # all are drawn, so each is drawn as often
            return replace(selection, weights=samples)
        return replace(selection, weights=samples / chances[drawn])

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Redistribute the probabilities of the clients whose updates arrived, among these
        clients."""
        clients = int(outcome.selected.max(initial=-1)) + 1
        chances = _grown(state.arrays["chances"], clients)
        facts = outcome.facts
        if facts is not None and len(facts.rows):
            before = chances[facts.rows]
            samples = facts.samples
            if self.sets_weights:  # `facts.samples` are the weights
                samples = relative_samples(outcome.samples, clients)[facts.rows]
            chances[facts.rows] = shared(before, samples, facts, self.diversity)
        return State(arrays={"chances": chances})


def shared(before: Floats, samples: Floats, facts: UpdateFacts, diversity: float) -> Floats:
    """Return the new probabilities of a round's clients.

    Their sum is that of `before`, unless a probability is raised to its minimum.

    The probabilities stay as they are if the updates are all 0 or not all finite.
    """
    gram = facts.gram
    with np.errstate(over="ignore", invalid="ignore"):
        if len(facts.steps):
            gram = gram / np.outer(facts.steps, facts.steps)
        gram = gram / np.abs(gram).max()
        squares = np.diagonal(gram)
        apart = squares - 2 * gram.mean(axis=1) + gram.mean()
        lengths, away = np.sqrt(squares.clip(min=0)), np.sqrt(apart.clip(min=0))
        importance = samples / samples.max() * ((1 - diversity) * lengths + diversity * away)
        total = importance.sum()
    if not (np.isfinite(total) and total > 0):
        return before
    found: Floats = np.maximum(before.sum() * (importance / total), _LEAST)
    return found


def _grown(chances: Floats, clients: int) -> Floats:
    """Return a copy of the probabilities, with the mean for each client that has joined since the
    last round."""
    joined = max(0, clients - len(chances))
    mean = float(chances.mean()) if len(chances) else 1.0
    return np.append(chances, np.full(joined, mean))
