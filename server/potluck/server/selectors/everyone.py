"""A selector for full participation: every available client in every round."""

from __future__ import annotations

from potluck.server.selection import Selection, SelectionContext, Selector
from potluck.server.state import State


class Everyone(Selector):
    """All available clients train, however many the run asks for.

    The run's `count` is the number of clients that it waits for before a round; with fewer, the
    quorum is a share of it. This selector is the upper limit to compare selections with, at the
    cost of every client's training. FedDiverse runs FedNova like this. Needs no profile. O(K) per
    round.
    """

    def everybody(self, round_number: int) -> bool:
        """Return True: in every round."""
        return True

    def select(self, state: State, context: SelectionContext) -> Selection:
        """Return all available clients, in the order of their rows."""
        rows = context.available[: context.count]
        return Selection(rows=rows, reasons=["everybody trains"] * len(rows))
