"""A run's row in the store, and the messages that people get about it."""

from __future__ import annotations

import structlog

from potluck.common.errors import PotluckError, StorageError
from potluck.server.clock import utc
from potluck.server.store.records import RunRow, RunState
from potluck.server.store.store_thread import InStore
from potluck.server.watching.feed import RunFeed

log = structlog.get_logger()


class RunRecord:
    """There from a run's first moment to its last, also while it is prepared or ends."""

    def __init__(self, row: RunRow, in_store: InStore) -> None:
        self.row = row
        """The run as it is in the store."""
        self.feed = RunFeed()
        self.log = log.bind(run=row.run_id)
        self._in_store = in_store

    def say(self, text: str, *, warning: bool = False) -> None:
        """Publish something that a person should know."""
        (self.log.warning if warning else self.log.info)(text)
        self.feed.say(text, utc(), warning=warning)

    def warn(self, text: str) -> None:
        """Publish something that a person should look into."""
        self.say(text, warning=True)

    def reason(self, error: PotluckError) -> str:
        """Return the reason of a failure; for a disk or a database also how to resume
        afterwards."""
        if not isinstance(error, StorageError):
            return error.message
        return f"{error.message}; then `potluck resume {self.row.run_id}`"

    async def set_state(self, state: RunState, reason: str) -> None:
        """The run is in another state from now on."""
        run_id = self.row.run_id
        await self._in_store(lambda store: store.set_run_state(run_id, state, reason, utc()))
        self.row = await self._in_store(lambda store: store.run(run_id))
