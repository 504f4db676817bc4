"""A selector with weights that even out known interaction matrices (FedDiverse §5.7)."""

from __future__ import annotations

import numpy as np

from potluck.server.selection import Selection, SelectionContext, Selector, Signal
from potluck.server.selectors.parts.choosing import Cohort, disclosed, profiles
from potluck.server.selectors.parts.minimum_variance import minimum_variance_weights
from potluck.server.state import State


class KnownMatrix(Selector):
    """Draws clients by weights that make classes and attributes most even.

    With these weights, the sum of the clients' matrices is as even as possible. The weights are
    computed again for the available clients of each round. Often few clients have a weight above 0.
    These are drawn first, the rest of the cohort uniformly; the reasons include the number of
    clients with a weight. Clients without a matrix can only be drawn uniformly. O(K · classes²).
    """

    needs_profiles = frozenset({Signal.INTERACTION_MATRIX})

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Draw `count` clients without replacement, by weight."""
        generator = context.generator("known-matrix")
        cohort = Cohort(context, generator)
        matrices = context.population.interaction_matrices
        rows = disclosed(matrices, context.available)
        if matrices is not None and len(rows):
            weights = minimum_variance_weights(profiles(matrices, rows).reshape(len(rows), -1))
            support = np.flatnonzero(weights > 0)
            # Sorting exponential variables of these rates gives the order of successive weighted
            # draws.
            arrivals = generator.exponential(size=len(support)) / weights[support]
            size = min(cohort.missing, len(support))
            first = np.argpartition(arrivals, size - 1)[:size] if size else support[:0]
            drawn = support[first[np.argsort(arrivals[first])]]
            reasons = [f"weight {weight:.3g}, one of {len(support)}" for weight in weights[drawn]]
            cohort.extend(rows[drawn].tolist(), reasons)
        cohort.draw(cohort.missing, "no weight; drawn uniformly")
        return cohort.selection()
