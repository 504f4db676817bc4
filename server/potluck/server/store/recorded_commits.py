"""A journal of commits outside the database. After a start, it shows which commits the database has
lost.

The journal lists the number of each committed round. The records contain the rounds' database rows,
from which `potluck-server rebuild` restores lost rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from potluck.common.errors import StorageError
from potluck.server.store import RoundRow, RunRow, Store
from potluck.server.store.journal import Journal, LostRounds, Noted, losses
from potluck.server.store.round_copies import RoundRecords, Tables
from potluck.server.store.store_thread import InStore

log = structlog.get_logger()

JOURNAL = "journal"
"""Name of the journal in a state directory."""

RECORDS = "records"
"""Name of the folder with the records of rounds in a state directory."""


class Commits:
    """The journal and the records of committed rounds. Used on the event loop."""

    def __init__(self, state_directory: Path, in_store: InStore) -> None:
        self._journal = Journal(state_directory / JOURNAL)
        self._records = RoundRecords(state_directory / RECORDS)
        self._rosters: dict[str, int] = {}  # number of clients in the recorded roster, by run
        self._in_store = in_store
        self._one_at_a_time = asyncio.Lock()
        self._lost_files: dict[str, set[str]] = {}

    @property
    def spared(self) -> set[str]:
        """Digests of files of rounds that the database has lost. They are not deleted, because a
        backup or a record may refer to them."""
        return set[str]().union(*self._lost_files.values())

    async def compare(self) -> Mapping[str, LostRounds]:
        """Return the rounds that the database has lost, by run. Raises StorageError."""
        noted = await asyncio.to_thread(self._journal.read)
        committed: dict[str, int] = await self._in_store(lambda store: store.last_rounds())
        last = {each.run_id: each for each in noted}
        found = {
            run_id: replace(loss, recorded=self._has_more(loss))
            for run_id, loss in losses(noted, committed).items()
        }
        for each in noted:
            if each.run_id in found and each.round > committed.get(each.run_id, -1):
                self._lost_files.setdefault(each.run_id, set()).update(each.files)
        behind = [
            Noted(run_id=run_id, round=number)
            for run_id, number in committed.items()
            if number and (run_id not in last or last[run_id].round < number)
        ]
        if not found:  # if rounds were lost, the journal keeps every line
            kept = list((last | {each.run_id: each for each in behind}).values())
            await asyncio.to_thread(self._journal.shorten, kept, len(noted))
        await self._add(*behind)
        return found

    async def note(self, row: RoundRow) -> None:
        """Record a committed round. If the disk can't be written, log a warning."""
        noted = Noted(
            run_id=row.key.run_id,
            round=row.key.round,
            model_blake3=row.model_blake3,
            state_blake3=row.state_blake3 or "",
        )
        try:
            await self._record(row)
        except StorageError as error:
            log.warning("round not recorded", reason=error.message)
        try:
            await self._add(noted)
        except StorageError as error:
            log.warning("commit not recorded in the journal", reason=error.message)

    async def accept(self, row: RunRow) -> None:
        """Treat a run's last round in the database as its last committed one; delete records of
        later rounds. Raises StorageError."""
        self._lost_files.pop(row.run_id, None)
        await asyncio.to_thread(self._records.drop_after, row.run_id, row.committed_rounds)
        await self._add(Noted(run_id=row.run_id, round=row.committed_rounds))

    async def forget(self, *run_ids: str) -> None:
        """Record that runs will be deleted, so that their rounds don't count as lost. Raises
        StorageError."""
        await self._add(*(Noted(run_id=run_id, round=0) for run_id in run_ids))

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _has_more(self, loss: LostRounds) -> bool:
        rounds = self._records.rounds(loss.run_id)
        return bool(rounds) and rounds[-1] > (loss.committed or 0)

    async def _record(self, row: RoundRow) -> None:
        """Record the rows of a round, and of the rounds before it that have no record."""
        run_id, number = row.key.run_id, row.key.round
        if run_id not in self._rosters:
            # After a backup is restored, rounds are repeated: drop their outdated records.
            await asyncio.to_thread(self._records.drop_after, run_id, number)
        begin = number
        while begin > 1 and not self._records.has(run_id, begin - 1):
            begin -= 1
        for each in range(begin, number + 1):
            copy = partial(
                Store.copy_round,
                run_id=run_id,
                number=each,
                roster_from=self._rosters.get(run_id, 0),
            )
            tables: Tables = await self._in_store(copy)
            await asyncio.to_thread(self._records.write, run_id, each, tables)
            rows = tables["roster"]
            if rows:
                self._rosters[run_id] = rows[-1]["row"] + 1

    async def _add(self, *noted: Noted) -> None:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._journal.add, noted)
