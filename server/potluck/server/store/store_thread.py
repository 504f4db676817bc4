"""The store in its own thread, for callers on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import structlog

from potluck.common.errors import UnreachableError
from potluck.server.store.store import Store

log = structlog.get_logger()
T = TypeVar("T")

LOOK_SECONDS = 15.0
"""Seconds between checks of the database."""

InStore = Callable[[Callable[[Store], Any]], Awaitable[Any]]
"""Function that calls its argument with the store; see `StoreThread.call`."""


class StoreThread:
    """An open store and the only thread that calls it."""

    def __init__(self, store: Store, thread: ThreadPoolExecutor) -> None:
        self._store = store
        self._thread = thread
        self._why_away = ""
        self._gone = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator[StoreThread]:
        """Open a store; close it at the end of the block. Raises the errors of `Store.open`."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="store") as thread:
            store = await loop.run_in_executor(thread, Store.open, url)
            try:
                yield cls(store, thread)
            finally:
                await loop.run_in_executor(thread, store.close)

    @property
    def name(self) -> str:
        """Name of the database for messages, without its password."""
        return self._store.name

    async def call(self, call: Callable[[Store], T]) -> T:
        """Call a function with the store, in the store's thread. A call that has started is always
        finished.

        The call waits while the database is unreachable. `Store.patiently` has the conditions for
        the function.
        """
        loop = asyncio.get_running_loop()
        patiently = partial(self._store.patiently, call)
        return await asyncio.shield(loop.run_in_executor(self._thread, patiently))

    async def ask(self, question: Callable[[Store], T]) -> T:
        """Call a function with the store, in the store's thread, without waiting for an unreachable
        database.

        Raises UnreachableError if the database is unreachable, or becomes so before the answer.
        """
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._thread, partial(self._store.patiently, question))
        gone = asyncio.create_task(self._gone.wait())
        try:
            first: list[asyncio.Future[Any]] = [answer, gone]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            raise UnreachableError(
                f"the coordinator is waiting for its database: {self._why_away}; repeat the call "
                "later"
            )
        finally:
            gone.cancel()
            answer.cancel()

    def watch(
        self,
        tell_away: Callable[[str], None],
        tell_damaged: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set functions that are called, on the event loop, when the database's state changes.

        tell_away: called with the reason when the database becomes unreachable, and with "" when it
        is reachable again.

        tell_damaged: called with the reason if the database is found to be damaged.
        """
        loop = asyncio.get_running_loop()

        def note(why: str) -> None:
            self._why_away = why
            if why:
                self._gone.set()
            else:
                self._gone.clear()
            tell_away(why)

        def tell(why: str) -> None:
            if why:
                log.warning("waiting for the database", reason=why)
            else:
                log.info("database connected again")
            loop.call_soon_threadsafe(note, why)

        def damaged(why: str) -> None:
            log.error("database is damaged", reason=why)
            loop.call_soon_threadsafe(tell_damaged, why)

        self._store.watch(tell, damaged)

    async def look_for_ever(self) -> None:
        """Check regularly whether the database is damaged. `watch` sets the function that is then
        called."""
        while True:
            await asyncio.to_thread(self._store.look)
            await asyncio.sleep(LOOK_SECONDS)

    def give_up(self) -> None:
        """Stop waiting for an unreachable database."""
        self._store.give_up()
