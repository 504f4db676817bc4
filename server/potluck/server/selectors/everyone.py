"""Full participation: every available client in every round."""

from __future__ import annotations

from potluck.server.selection import Selection, SelectionContext, Selector
from potluck.server.state import State


class Everyone(Selector):
    """All available clients train, however many the run asks for; its `count` is for how many the
    run waits, and what a quorum is a share of where fewer are there.

    The upper end of what a selection can be compared with, at the cost of every client's training.
    FedDiverse runs FedNova so. Needs no profile. O(K) per round.
    """

    def everybody(self, round_number: int) -> bool:
        """In every round."""
        return True

    def select(self, state: State, context: SelectionContext) -> Selection:
        """All available clients, in the order of their rows."""
        rows = context.available[: context.count]
        return Selection(rows=rows, reasons=["everybody trains"] * len(rows))
