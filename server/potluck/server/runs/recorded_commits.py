"""Commits beside the journal: notes each one, and knows at a start which the database lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog

from potluck.common.errors import StorageError
from potluck.server.store import RoundRow, RunRow
from potluck.server.store.journal import Journal, LostRounds, Noted, losses
from potluck.server.store.store_thread import InStore

log = structlog.get_logger()


class Commits:
    """Lives on the event loop."""

    def __init__(self, journal: Path, in_store: InStore) -> None:
        self._journal = Journal(journal)
        self._in_store = in_store
        self._one_at_a_time = asyncio.Lock()
        self.spared: set[str] = set()
        """Files of rounds that the database lost: a backup may name them."""

    async def compare(self) -> Mapping[str, LostRounds]:
        """By run what the database has lost since. Raises StorageError."""
        noted = await asyncio.to_thread(self._journal.read)
        committed: dict[str, int] = await self._in_store(lambda store: store.last_rounds())
        last = {each.run_id: each for each in noted}
        found = losses(noted, committed)
        for each in noted:
            if each.run_id in found and each.round > committed.get(each.run_id, -1):
                self.spared |= each.files
        behind = [
            Noted(run_id=run_id, round=number)
            for run_id, number in committed.items()
            if number and (run_id not in last or last[run_id].round < number)
        ]
        if not found:  # else every line may still be of use
            kept = list((last | {each.run_id: each for each in behind}).values())
            await asyncio.to_thread(self._journal.shorten, kept, len(noted))
        await self._add(*behind)
        return found

    async def note(self, row: RoundRow) -> None:
        """A round was committed. A journal that can't be written holds up no run."""
        noted = Noted(
            run_id=row.key.run_id,
            round=row.key.round,
            model_blake3=row.model_blake3,
            state_blake3=row.state_blake3 or "",
        )
        try:
            await self._add(noted)
        except StorageError as error:
            log.warning("a commit was not noted in the journal", reason=error.message)

    async def accept(self, row: RunRow) -> None:
        """A run goes on from where the database is, whatever was committed. Raises StorageError."""
        await self._add(Noted(run_id=row.run_id, round=row.committed_rounds))

    async def forget(self, *run_ids: str) -> None:
        """Runs are about to be deleted: that they are gone is no loss. Raises StorageError."""
        await self._add(*(Noted(run_id=run_id, round=0) for run_id in run_ids))

    def close(self) -> None:
        """Nothing is noted any more."""
        self._journal.close()

    async def _add(self, *noted: Noted) -> None:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._journal.add, noted)
