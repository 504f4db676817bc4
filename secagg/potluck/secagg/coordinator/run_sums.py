"""The secure sums of label counts that selectors need before or during a selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError
from potluck.secagg.coordinator.counts import SecureSums
from potluck.secagg.coordinator.label_sums import LabelCells, LabelTotals, sum_terms
from potluck.server.eligibility.collected_sums import LabelSums, Say
from potluck.server.plan.plan import RunPlan


class RunSums(SecureSums):
    """The `SumCollector` of a coordinator. Runs on the event loop."""

    def of_run(self, run_id: str, plan: RunPlan, say: Say) -> LabelSums:
        """Return the source of a run's label counts: sums by cell, or one total."""
        by_cell = plan.run_file.profiles.disclosure == "cells"
        kind = LabelCells if by_cell else LabelTotals
        return kind(run_id, plan, self, self.trust, say)

    async def at_step(
        self,
        run_id: str,
        plan: RunPlan,
        clients: Sequence[str],
        present: Callable[[str], bool],
        say: Say,
    ) -> tuple[Sequence[str], NDArray[np.int64]] | None:
        """Sum the label counts of these clients; return the clients in the sum, and the sum. Return
        None, after a notice, if the sum failed.

        Only clients whose owner allows `unsafe-stepwise` take part: differences of such sums reveal
        single clients' counts.
        """
        try:
            terms = sum_terms(run_id, plan, SumKind.STEPWISE)
            outcome = await self.sum_counts(terms, clients, present=present)
        except RunError as error:
            say(
                f"no secure sum over {len(clients)} selected clients: {error.message}", warning=True
            )
            return None
        if outcome.total is None:
            say(
                f"no secure sum over {len(clients)} selected clients: {outcome.explain()}",
                warning=True,
            )
            return None
        return sorted(outcome.record.clients), outcome.total
