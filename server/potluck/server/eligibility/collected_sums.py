"""Interface to the label counts of a run's clients that come from secure sums.

`potluck.secagg` computes the sums. The coordinator finds it by name, in the entry point group
`potluck.secure_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.common.settings import plugins
from potluck.server.hosts.attendance import Attendance
from potluck.server.plan.path_rules import COLLECTOR, collects_sums
from potluck.server.plan.plan import RunPlan
from potluck.server.profiles.trust import Trust
from potluck.server.store.store_thread import InStore

Counts = NDArray[np.float64]

Say = Callable[..., None]
"""Function that publishes a text for the operators; `warning=True` for a problem."""

PhaseObserver = Callable[[str, float, int], None]
"""Function called after each phase of a sum, with the phase's name, its seconds, and the number of
clients that dropped out in it."""

NO_SUMS = "this coordinator lacks the package potluck.secagg; install all packages of Potluck"
"""The reason why a coordinator has no collector, with the remedy."""


class LabelSums:
    """The label counts of one run that come from secure sums. This base class is for runs without
    such sums. Used on the event loop.

    totals: label counts summed over all clients. cell_counts: for each client, the mean label
    counts of its cell; None if label counts are not summed by cell.
    """

    def __init__(self) -> None:
        self.totals: Counts | None = None
        self.cell_counts: dict[str, Counts] | None = None

    async def find(self, clients: Sequence[str], present: Callable[[str], bool]) -> None:
        """Find or compute the sums that the run needs over these clients. Raises RunError if they
        fail and the run can't continue without them."""


class SumCollector(Protocol):
    """Asks clients for secure sums of label counts. Used on the event loop."""

    observe: PhaseObserver

    def of_run(self, run_id: str, plan: RunPlan, say: Say) -> LabelSums:
        """Return the label counts of a run: by cell, or the total over all its clients."""
        ...

    async def at_step(
        self,
        run_id: str,
        plan: RunPlan,
        clients: Sequence[str],
        present: Callable[[str], bool],
        say: Say,
    ) -> tuple[Sequence[str], NDArray[np.int64]] | None:
        """Compute a secure sum of label counts over these clients. Return the clients included in
        the sum, and the sum.

        If the sum failed, publishes a notice and returns None.
        """
        ...


def open_collector(
    attendance: Attendance, in_store: InStore, trust: Trust, observe: PhaseObserver
) -> SumCollector | None:
    """Return a collector of secure sums; None if secure aggregation is not installed."""
    if not collects_sums():
        return None
    make: Callable[..., Any] = plugins.find_callable(plugins.SECURE_SUMS, COLLECTOR)
    found: SumCollector = make(attendance, in_store, trust, observe)
    return found
