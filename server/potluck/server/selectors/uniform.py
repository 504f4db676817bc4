"""A selector that draws every available client with the same probability."""

from __future__ import annotations

from potluck.server.selection import Selection, SelectionContext, Selector
from potluck.server.selectors.parts.choosing import Cohort
from potluck.server.state import State


class Uniform(Selector):
    """Draws the cohort uniformly without replacement; has no state.

    Needs no profile. O(count) per round.
    """

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return `count` available clients, or all if there are fewer, in random order."""
        cohort = Cohort(context, context.generator("uniform"))
        cohort.draw(cohort.size, "drawn uniformly")
        return cohort.selection()
