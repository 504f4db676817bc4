"""A selector that selects all clients in turn (a baseline in the FedDiverse paper)."""

from __future__ import annotations

import numpy as np

from potluck.server.selection import (
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
)
from potluck.server.selectors.parts.choosing import Cohort
from potluck.server.selectors.parts.selection_counts import counted, no_selections, selections_of
from potluck.server.state import State


class RoundRobin(Selector):
    """Selects the clients that were selected least often, with ties broken at random.

    Failed selections count too, so a client that always fails is not selected forever. Clients that
    were disconnected or joined late catch up by at most one selection per round. Needs no profile.
    O(K).
    """

    def init(self, population: Population) -> State:
        """Return a state in which no client was selected. selections: number of selections of each
        row."""
        return State(arrays=no_selections(len(population)))

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return the `count` available clients with the fewest selections."""
        generator = context.generator("round-robin")
        cohort = Cohort(context, generator)
        selections = selections_of(state, len(context.population))
        shuffled = generator.permutation(context.available)
        times = selections[shuffled]
        order = np.argsort(times, kind="stable")[: cohort.size]
        reasons = [_reason(count) for count in times[order].tolist()]
        cohort.extend(shuffled[order].tolist(), reasons)
        return cohort.selection()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """Count the selections of this round's cohort; add rows for clients that have joined."""
        return State(arrays=counted(state, outcome))


def _reason(count: int) -> str:
    words = {0: "never selected", 1: "selected once", 2: "selected twice"}
    return words.get(count, f"selected {count} times") + " before"
