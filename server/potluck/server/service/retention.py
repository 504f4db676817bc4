"""Deletes model files that no run needs any more. Lives on the event loop.

A file stays while a run under way uses it, while the run that it was written for has not named it
yet, and while a round that names it is within its run's retention. After a commit, only files that
may have become unnecessary are checked: new ones, those that this round pushes out of retention,
and the run's previous best model. Files that a coordinator finds at its start are checked once, in
the background.
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
"""Files looked at in one go, so that rounds get their turn between."""
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.05
"""Between attempts to empty SQLite's log: another program's read ends soon, as a rule."""


class Tidying:
    """Deletes model files that no run needs any more. in_use: those that must not be deleted."""

    def __init__(
        self, files: ModelFiles, in_store: InStore, in_use: Callable[[], set[str]]
    ) -> None:
        self._files = files
        self._in_store = in_store
        self._in_use = in_use
        self._done: dict[str, int] = {}  # by run, the last round after which it was tidied up
        self._one_at_a_time = asyncio.Lock()

    def begin(self, run_id: str, committed: int) -> None:
        """A run is driven from now on: what was to go before this round has gone, or will by
        `look_at`."""
        self._done.setdefault(run_id, committed)

    async def after_commit(self, run_id: str, retention: Retention, committed: int) -> None:
        """Empty the database's log, so that damage to it can't undo this committed round; then
        delete what the run doesn't need any more."""
        async with self._one_at_a_time:
            await self._log_emptied()
            done = self._done.get(run_id, 0)
            out = partial(_out_of_retention, run_id=run_id, keep=retention.keep_last)
            references = await self._in_store(partial(out, done=done, committed=committed))
            self._files.reconsider(references)
            await self._tidy(self._files.unsettled(), run_id=run_id, done=done)
            self._done[run_id] = committed

    async def look_at(self, found: Collection[str]) -> None:
        """Delete those of the files found at the start that are not needed."""
        files = sorted(found)
        for begin in range(0, len(files), _AT_ONCE):
            async with self._one_at_a_time:
                some = set(files[begin : begin + _AT_ONCE])
                self._files.reconsider(some)
                await self._tidy(some)

    async def _tidy(self, candidates: set[str], run_id: str = "", done: int = 0) -> None:
        """Delete those of some files that are not needed.

        run_id: the run whose rounds from `done` on have named the files written for them. Rounds of
        other runs prove nothing: a file may be written again for a round that has yet to name it.
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
        # A database whose log is damaged falls back to an earlier round: its files must be there.
        if gone and await self._log_emptied():
            await asyncio.to_thread(self._files.delete, gone - self._in_use())

    async def _log_emptied(self) -> bool:
        """Empty the database's log. Returns False if other programs read it all the time."""
        for attempt in range(_ATTEMPTS):
            if await self._in_store(Store.checkpoint):
                return True
            if attempt + 1 < _ATTEMPTS:
                await asyncio.sleep(_PAUSE_SECONDS)
        return False


def is_kept(holder: FileHolder) -> bool:
    """True if a run's retention keeps a file of one of its rounds."""
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
    """None for a run file of another release; better too many files than too few."""
    try:
        return parse_run_file(run_file, source="run file").kept_models
    except ConfigurationError:
        return None


def _out_of_retention(
    store: Store, *, run_id: str, keep: int, done: int, committed: int
) -> set[str]:
    """The files of a run that the rounds after `done` may have pushed out of retention."""
    models = store.model_references(run_id, first=done - keep + 1, last=committed - keep)
    states = store.model_references(run_id, first=done, last=committed - 1)
    of_states = {each.state_blake3 for each in states if each.state_blake3 is not None}
    bests = store.best_references(run_id, first=done, last=committed - 1)
    return of_states | {each.model_blake3 for each in (*models, *bests)}
