"""A run's row in the store, and the notices about it."""

from __future__ import annotations

import structlog

from potluck.common.errors import PotluckError, StorageError
from potluck.server.clock import utc
from potluck.server.store.records import RunRow, RunState
from potluck.server.store.store_thread import InStore
from potluck.server.watching.feed import RunFeed

log = structlog.get_logger()


class RunRecord:
    """Holds a run's row and feed. It exists during the whole life of a run's driver."""

    def __init__(self, row: RunRow, in_store: InStore) -> None:
        self.row = row
        """The run's row in the store."""
        self.feed = RunFeed()
        self.log = log.bind(run=row.run_id)
        self._in_store = in_store

    def say(self, text: str, *, warning: bool = False) -> None:
        """Publish a notice for operators."""
        (self.log.warning if warning else self.log.info)(text)
        self.feed.say(text, utc(), warning=warning)

    def warn(self, text: str) -> None:
        """Publish a warning for operators."""
        self.say(text, warning=True)

    def reason(self, error: PotluckError) -> str:
        """Return the reason of a failure; for a disk or database, add how to resume the run."""
        if not isinstance(error, StorageError):
            return error.message
        return f"{error.message}; then `potluck resume {self.row.run_id}`"

    async def set_state(self, state: RunState, reason: str) -> None:
        """Store the run's new state and publish it."""
        run_id = self.row.run_id
        await self._in_store(lambda store: store.set_run_state(run_id, state, reason, utc()))
        self.row = await self._in_store(lambda store: store.run(run_id))
