"""The base of selectors that remember nothing between rounds."""

from __future__ import annotations

from potluck.server.selection import Population, RoundOutcome
from potluck.server.state import State


class Stateless:
    """`init` and `observe` of a selector whose choice depends on profiles and round alone."""

    def init(self, population: Population) -> State:
        """An empty state."""
        return State()

    def observe(self, state: State, outcome: RoundOutcome) -> State:
        """The same state."""
        return state
