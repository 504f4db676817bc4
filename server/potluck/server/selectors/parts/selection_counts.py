"""Counts how often each client was selected, for selectors that prefer clients selected rarely.

State: `selections`, K, int64: number of selections of each row, whether or not an update arrived
or was needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from potluck.server.selection import RoundOutcome
from potluck.server.selectors.parts.choosing import grown
from potluck.server.state import State

Counts = NDArray[np.int64]

SELECTIONS = "selections"
"""Name of the counts in the state."""


def no_selections(clients: int) -> dict[str, Counts]:
    """Return the counts before round 1."""
    return {SELECTIONS: np.zeros(clients, dtype=np.int64)}


def selections_of(state: State, clients: int) -> Counts:
    """Return a copy of the counts, with a zero for each client that has joined since the last
    round."""
    return grown(state.arrays[SELECTIONS], clients)


def counted(state: State, outcome: RoundOutcome) -> dict[str, Counts]:
    """Return the counts after a round; failed selections count too.

    Clients that over-selection made unnecessary also count. Otherwise the slowest client would keep
    the fewest selections, and get one place in every round.
    """
    selections = selections_of(state, int(outcome.cohort.max(initial=-1)) + 1)
    np.add.at(selections, outcome.cohort, 1)
    return {SELECTIONS: selections}
