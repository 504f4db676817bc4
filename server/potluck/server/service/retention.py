"""Deletes model files that no run needs any more. Used on the event loop.

A file is kept while a current run uses it, and until the run for which it was written has
referenced it. It is also kept while a round that references it is within its run's retention.

After a commit, only files that may have become unnecessary are checked: new files, files that leave
the retention with this round, and the run's previous best model. Files that a coordinator finds at
its start are checked once, in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import lru_cache, partial

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.run_settings import Retention
from potluck.common.run_file.runfile import parse_run_file
from potluck.server.store import FileHolder, Store
from potluck.server.store.model_files import ModelFiles
from potluck.server.store.store_thread import InStore

_AT_ONCE = 500
"""Number of files checked at once. Between two checks, other callers can use the store."""
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.05
"""Seconds between attempts to empty SQLite's log. A read by another program, which blocks it,
usually ends soon."""


class Tidying:
    """Deletes model files that no run needs any more. in_use: function that returns the digests to
    keep."""

    def __init__(
        self, files: ModelFiles, in_store: InStore, in_use: Callable[[], set[str]]
    ) -> None:
        self._files = files
        self._in_store = in_store
        self._in_use = in_use
        self._done: dict[str, int] = {}  # by run, the last round after which files were deleted
        self._one_at_a_time = asyncio.Lock()

    def begin(self, run_id: str, committed: int) -> None:
        """Register a run that is driven now. Files of its rounds up to `committed` are checked by
        `look_at`, not after each commit."""
        self._done.setdefault(run_id, committed)

    async def after_commit(self, run_id: str, retention: Retention, committed: int) -> None:
        """Empty the database's log, then delete files that the run no longer needs.

        Once the log is empty, damage to it can't undo the committed round.
        """
        async with self._one_at_a_time:
            await self._log_emptied()
            done = self._done.get(run_id, 0)
            out = partial(_out_of_retention, run_id=run_id, keep=retention.keep_last)
            references = await self._in_store(partial(out, done=done, committed=committed))
            self._files.reconsider(references)
            await self._tidy(self._files.unsettled(), run_id=run_id, done=done)
            self._done[run_id] = committed

    async def look_at(self, found: Collection[str]) -> None:
        """Delete those of these files that are no longer needed. found: digests of the files that
        existed when the coordinator started."""
        files = sorted(found)
        for begin in range(0, len(files), _AT_ONCE):
            async with self._one_at_a_time:
                some = set(files[begin : begin + _AT_ONCE])
                self._files.reconsider(some)
                await self._tidy(some)

    async def _tidy(self, candidates: set[str], run_id: str = "", done: int = 0) -> None:
        """Delete the candidates that are not needed.

        run_id, done: the run whose rounds after `done` have referenced the files written for them.
        References by other runs are ignored: a file may be written again for a round that will
        reference it later.
        """
        in_use = self._in_use()
        self._files.needed(in_use)
        unused = candidates - in_use
        if not unused:
            return
        holders: list[FileHolder] = await self._in_store(lambda store: store.holders(unused))
        named = {
            holder.blake3 for holder in holders if holder.run_id == run_id and holder.round >= done
        }
        kept = {holder.blake3 for holder in holders if is_kept(holder)}
        self._files.needed(named)
        self._files.settle(kept)
        gone = unused - kept
        # A database with a damaged log returns to an earlier round, whose files must still exist.
        if gone and await self._log_emptied():
            await asyncio.to_thread(self._files.delete, gone - self._in_use())

    async def _log_emptied(self) -> bool:
        """Empty the database's log. Return False if other programs read the database
        continuously."""
        for attempt in range(_ATTEMPTS):
            if await self._in_store(Store.checkpoint):
                return True
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(_PAUSE_SECONDS)
        return False


def is_kept(holder: FileHolder) -> bool:
    """Return True if a run's retention requires that a file of one of its rounds is kept."""
    age = holder.committed_rounds - holder.round
    if holder.of_state or age == 0:
        return age == 0
    if holder.round == holder.best_round:
        return True
    retention = _retention(holder.run_file)
    if retention is None:
        return True
    spared = retention.keep_every and holder.round % retention.keep_every == 0
    return age < retention.keep_last or bool(spared)


@lru_cache(maxsize=1000)
def _retention(run_file: str) -> Retention | None:
    """Return the retention in a run file. Return None if another release wrote the run file; all
    files are then kept."""
    try:
        return parse_run_file(run_file, source="run file").kept_models
    except ConfigurationError:
        return None


def _out_of_retention(
    store: Store, *, run_id: str, keep: int, done: int, committed: int
) -> set[str]:
    """Return the files that may have left a run's retention with the rounds after `done`."""
    models = store.model_references(run_id, first=done - keep + 1, last=committed - keep)
    states = store.model_references(run_id, first=done, last=committed - 1)
    of_states = {each.state_blake3 for each in states if each.state_blake3 is not None}
    bests = store.best_references(run_id, first=done, last=committed - 1)
    return of_states | {each.model_blake3 for each in (*models, *bests)}
