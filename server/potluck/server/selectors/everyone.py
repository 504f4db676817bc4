"""A selector for full participation: every available client in every round."""

from __future__ import annotations

from potluck.server.selection import Selection, SelectionContext, Selector
from potluck.server.state import State


class Everyone(Selector):
    """Selects all available clients, even if the run asks for fewer.

    The run's `count` is the number of clients that the run waits for before a round; if there are
    fewer, the quorum is a share of it. This selector is an upper limit to compare other selectors
    with; every client trains in every round. The FedDiverse paper runs FedNova with full
    participation. Needs no profile. O(K) per round.
    """

    def everybody(self, round_number: int) -> bool:
        """Return True, for every round."""
        return True

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return all available clients, in the order of their rows."""
        rows = context.available[: context.count]
        return Selection(rows=rows, reasons=["everybody trains"] * len(rows))
