"""Interface for cryptographic commitments to a run's selections, which hosts can verify.

`potluck.verifiable` implements it. The core finds it by name, in the entry-point group
`potluck.integrations`, for runs with `[selection] verifiable = true`.
"""

from __future__ import annotations

from typing import Final

from potluck.common.settings import plugins
from potluck.rpc.v1 import coordinator_pb2
from potluck.server.live.run import Run
from potluck.server.selection import RoundOutcome, Selection, SelectionContext
from potluck.server.state import State
from potluck.server.store.records import AttemptKey

RECORD: Final = "selection-record"
"""Entry-point name of the class that records and proves selections, in the group
`potluck.integrations`."""


class SelectionRecord:
    """Makes a run's commitments to its selections; this base class makes none. Used on the event
    loop."""

    async def begin(self, context: SelectionContext, key: AttemptKey) -> SelectionContext:  # noqa: ARG002  for subclasses
        """Commit to the inputs of a selection; return the context to select with.

        The returned context may have another seed and fewer available clients. Raises ScarceError
        if too few clients take part, ReplayError if the inputs differ from those before a restart.
        """
        return context

    async def chosen(
        self, context: SelectionContext, key: AttemptKey, selection: Selection
    ) -> None:
        """Commit to the cohort, before any of its clients is instructed to train.

        context: as `begin` returned it. Raises RunError if the cohort can't be proven, ReplayError
        if it differs from the one before a restart.
        """

    async def prove(self, work: coordinator_pb2.Train, key: AttemptKey) -> None:
        """Add to a training instruction the data by which hosts verify the attempt's selection."""

    async def committing(self, state: State, key: AttemptKey, outcome: RoundOutcome) -> None:
        """Record the selector's state after an attempt, before the attempt is committed.

        outcome: facts about the round, from which the selector has learned this state.

        If the coordinator is killed before the commit, the same attempt may come again with
        another state. Raises RunError if the attempt has no record, StorageError.
        """


def record_of(run: Run) -> SelectionRecord:
    """Return the object that makes a run's commitments to its selections."""
    if not run.plan.run_file.selection.verifiable:
        return SelectionRecord()
    found: SelectionRecord = plugins.integration(RECORD)(run)
    return found
