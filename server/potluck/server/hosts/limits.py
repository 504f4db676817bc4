"""Limits of a peer: its share of the coordinator's resources, and its minimum speed.

A peer is the holder of one certificate. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from potluck.common.errors import OverloadedError, ProtocolError, TruncatedError

Message = TypeVar("Message")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of peers; see the fields of the same names in `config.py`."""

    calls_per_peer: int = 300
    transfers_per_peer: int = 8
    first_message_seconds: float = 10.0
    stall_seconds: float = 60.0
    least_bytes_per_second: int = 10_000


class Admission:
    """Counts the open calls and the transfers of each peer."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._transfers: dict[str, asyncio.Semaphore] = {}

    @contextlib.contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Count a call while the block runs. Raises OverloadedError if the peer has too many open
        calls."""
        most = self._limits.calls_per_peer
        if self._calls[peer] >= most:
            raise OverloadedError(
                f"'{peer}' already has {most} calls in progress; wait until some calls end, or "
                "raise calls_per_peer of the coordinator",
                peer=peer,
                calls=most,
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
                self._transfers.pop(peer, None)

    def transfer(self, peer: str) -> asyncio.Semaphore:
        """Return the semaphore that limits this peer's simultaneous file transfers."""
        return self._transfers.setdefault(peer, asyncio.Semaphore(self._limits.transfers_per_peer))


class TransferSlots:
    """Limits the number of files that are transferred at full speed at once.

    Transferring many files at once takes the same total time, but each transfer holds messages in
    memory and in the processor's caches. A slow file must not delay the others: its turn ends, and
    its transfer continues without a turn.
    """

    def __init__(self, at_once: int, *, seconds: float, least_bytes: int) -> None:
        """seconds, least_bytes: a turn ends if fewer than `least_bytes` were transferred within
        `seconds`."""
        self._free = asyncio.Semaphore(at_once)
        self._seconds = seconds
        self._least_bytes = least_bytes

    @contextlib.asynccontextmanager
    async def turn(self, moved: Callable[[], int]) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while the block runs, unless the transfer is too slow.
        moved: function that returns the number of bytes transferred up to now."""
        await self._free.acquire()
        looking = asyncio.create_task(self._while_fast(moved))
        looking.add_done_callback(lambda _: self._free.release())
        try:
            yield
        finally:
            looking.cancel()

    async def _while_fast(self, moved: Callable[[], int]) -> None:
        before = -self._least_bytes
        while (after := moved()) - before >= self._least_bytes:
            before = after
            await asyncio.sleep(self._seconds)


async def with_first_message(
    requests: AsyncIterator[Message], limits: Limits
) -> AsyncIterator[Message]:
    """Yield the messages of a stream. Raises ProtocolError if the first message comes too late."""
    requests = aiter(requests)
    try:
        async with asyncio.timeout(limits.first_message_seconds):
            first = await anext(requests, None)
    except TimeoutError:
        raise ProtocolError(
            "the caller opened a stream and sent nothing within "
            f"{limits.first_message_seconds:g} s; send the first message earlier",
            seconds=limits.first_message_seconds,
        ) from None
    if first is not None:
        yield first
        async for request in requests:
            yield request


async def not_too_slow(
    requests: AsyncIterator[Message],
    limits: Limits,
    size_of: Callable[[Message], int],
    clock: Callable[[], float],
) -> AsyncIterator[Message]:
    """Yield the messages of an upload. Raises TruncatedError if the upload is too slow.

    Only the time spent waiting for the peer counts.
    """
    requests = aiter(requests)
    waited, received = 0.0, 0
    while True:
        seconds_left = limits.stall_seconds + received / limits.least_bytes_per_second - waited
        begun = clock()
        try:
            if seconds_left <= 0:
                raise TimeoutError
            async with asyncio.timeout(min(limits.stall_seconds, seconds_left)):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise TruncatedError(
                f"the upload stalled after {received} bytes; send the rest over a connection that "
                f"carries at least {limits.least_bytes_per_second} bytes per second",
                received=received,
            ) from None
        waited += clock() - begun
        received += size_of(request)
        yield request


async def not_left_unread(
    responses: AsyncIterator[Message], limits: Limits
) -> AsyncGenerator[Message, None]:
    """Yield the messages of a download. Cancel the download if its peer reads nothing for
    `stall_seconds`."""
    call = asyncio.current_task()
    loop = asyncio.get_running_loop()
    async for response in responses:
        # While this generator is suspended, gRPC waits until the peer can take the message.
        timer = loop.call_later(limits.stall_seconds, call.cancel) if call is not None else None
        try:
            yield response
        finally:
            if timer is not None:
                timer.cancel()
