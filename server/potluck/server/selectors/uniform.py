"""Every available client with the same probability (ALGORITHMS §1.1)."""

from __future__ import annotations

from typing import ClassVar

from potluck.server.selection import (
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Signal,
)
from potluck.server.state import State


class Uniform:
    """Draws the cohort uniformly without replacement; remembers nothing.

    Needs no profile. O(count) per round.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def init(self, population: Population) -> State:
        """No state."""
        return State()

    def select(self, state: State, context: SelectionContext) -> Selection:
        """`count` available clients, or all if there are fewer, in random order."""
        size = min(context.count, len(context.available))
        rows = context.generator("uniform").choice(context.available, size=size, replace=False)
        return Selection(rows=rows, reasons=["drawn uniformly"] * size)

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """No state."""
        return state
