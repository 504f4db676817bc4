"""Orders the streams that carry one update: a newer stream ends an older one.

A host that lost its connection sends the rest of its update over a new connection. Bytes of the old
connection may still arrive from the buffers of a proxy. They must not overwrite newer bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from potluck.common.errors import TruncatedError

_MOST_REMEMBERED = 10_000
"""Maximum number of files whose newest stream is remembered."""

FIRST = 1
"""Sequence number of an update's first stream."""

_LARGEST = 1 << 62

_File = tuple[str, str]
"""Id and BLAKE3 digest of an update."""


class UploadOrder:
    """Admits one stream at a time for each update. Used on the event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by update; a lock exists as long as a stream holds it or waits for it."""
        self._newest: OrderedDict[_File, int] = OrderedDict()
        self._receiving: dict[_File, asyncio.Timeout] = {}

    @asynccontextmanager
    async def turn(self, update_id: str, blake3: str, sequence: int) -> AsyncIterator[None]:
        """Wait until older streams of an update have ended. sequence: 0 for a stream without a
        number.

        Raises TruncatedError if a newer stream has started.
        """
        file, sequence = (update_id, blake3), min(sequence, _LARGEST)
        if sequence > self._newest.get(file, 0):
            self._set_newest(file, sequence)
        async with self._lock(update_id):
            self._check(file, sequence)
            yield

    @asynccontextmanager
    async def resumed(self, update_id: str, blake3: str) -> AsyncIterator[int]:
        """End older streams of an update; yield the sequence number of the next stream."""
        file = (update_id, blake3)
        sequence = max(self._newest.get(file, 0), FIRST) + 1
        self._set_newest(file, sequence)
        async with self._lock(update_id):
            yield sequence

    @asynccontextmanager
    async def idle(self, update_id: str) -> AsyncIterator[None]:
        """Wait until no stream of an update is open; no stream starts while the block runs."""
        async with self._lock(update_id):
            yield

    @asynccontextmanager
    async def receiving(self, update_id: str, blake3: str) -> AsyncIterator[None]:
        """Raise TruncatedError in the block when a newer stream starts. Use it within a turn."""
        file = (update_id, blake3)
        ending = asyncio.timeout(None)
        try:
            async with ending:
                self._receiving[file] = ending
                yield
        except TimeoutError:
            if not ending.expired():
                raise
            raise _overtaken(update_id) from None
        finally:
            self._receiving.pop(file, None)

    def _lock(self, update_id: str) -> asyncio.Lock:
        return self._locks.setdefault(update_id, asyncio.Lock())

    def _set_newest(self, file: _File, sequence: int) -> None:
        self._newest[file] = sequence
        self._newest.move_to_end(file)
        if len(self._newest) > _MOST_REMEMBERED:
            self._newest.popitem(last=False)
        ending = self._receiving.get(file)
        if ending is not None:
            ending.reschedule(asyncio.get_running_loop().time())

    def _check(self, file: _File, sequence: int) -> None:
        if 0 < sequence < self._newest.get(file, 0):
            raise _overtaken(file[0])


def _overtaken(update_id: str) -> TruncatedError:
    return TruncatedError(
        f"update '{update_id[:200]}' is being sent on a newer stream, so this stream was closed",
        update=update_id[:200],
    )
