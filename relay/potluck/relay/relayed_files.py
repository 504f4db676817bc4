"""Files on their way down: fetched once from the coordinator, and lent to every host that asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from potluck.client.base.state_directory import storage_error
from potluck.client.transfer.link import Link, calling
from potluck.client.transfer.model_cache import ModelCache
from potluck.common.errors import (
    DigestMismatchError,
    ProtocolError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction, RelaySource
from potluck.common.net.frames import require
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, part_path, verified
from potluck.relay.relay_metrics import RelayMetrics
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

_ATTEMPTS = 3
"""Times that a file may arrive with a wrong digest."""

_STALE_SECONDS = 24 * 3600.0


class RelayedFiles:
    """Files by their digest. Lives on the event loop; blocking work goes to threads."""

    def __init__(
        self,
        link: Link,
        cache: ModelCache,
        folder: Path,
        *,
        maximum_bytes: int,
        metrics: RelayMetrics,
    ) -> None:
        """`folder` is where files wait on their way; parts of an earlier process are kept."""
        self._link = link
        self._cache = cache
        self._folder = folder
        self._maximum = maximum_bytes
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        for path in folder.iterdir():
            if path.suffix != ".part" or path.stat().st_mtime < time.time() - _STALE_SECONDS:
                path.unlink()

    @contextlib.asynccontextmanager
    async def lent(self, blake3: str) -> AsyncIterator[Path]:
        """A file that stays while the block runs; those who want the same share one download.

        Goes on trying for as long as the coordinator can't be reached. Raises NotFoundError where
        it has no such file, DigestMismatchError, TooLargeError, ProtocolError or StorageError.
        """
        check_digest(blake3)
        with self._cache.pinned(blake3):
            lock = self._locks.setdefault(blake3, asyncio.Lock())
            async with lock:
                here = await self._here(blake3)
                if not here:
                    await self._fetch(blake3)
            self._metrics.lent(RelaySource.CACHE if here else RelaySource.COORDINATOR)
            self._cache.touch(blake3)
            yield self._cache.path(blake3)

    async def _here(self, blake3: str) -> bool:
        if not self._cache.holds(blake3):
            return False
        if await asyncio.to_thread(self._cache.verified, blake3):
            return True
        log.warning("file is corrupt, deleting it", file=blake3)
        self._cache.remove(blake3)
        return False

    async def _fetch(self, blake3: str) -> None:
        """Bring a file into the cache, however often it takes."""
        self._cache.make_room()
        path, backoff, mismatches = self._folder / blake3, self._link.backoff(), 0
        while True:
            begun = held_bytes(path)
            try:
                async with self._link.transfers:
                    with calling():
                        await self._stream(blake3, path)
                        break
            except (UnreachableError, TruncatedError) as error:
                log.info("download interrupted", file=blake3, error=error.message)
                if held_bytes(path) > begun:
                    backoff.reset()
            except DigestMismatchError:
                mismatches += 1
                if mismatches == _ATTEMPTS:
                    raise
            except OSError as error:
                part_path(path).unlink(missing_ok=True)  # on a full disk it is in everyone's way
                raise storage_error(path, error) from error
            await self._link.pause(backoff.next_seconds())
            self._metrics.retried(Direction.DOWN)
        path.replace(self._cache.path(blake3))
        self._cache.add(blake3)

    async def _stream(self, blake3: str, path: Path) -> None:
        """One attempt, from where the last one broke off."""
        chunks = self._link.chunks[Direction.DOWN]
        request = rpc.CoordinatorServiceFetchModelRequest(
            blake3=blake3, offset=held_bytes(path), chunk_bytes=chunks.bytes
        )
        call = self._link.fetch_model(request)
        receiver: FileReceiver | None = None
        begun, arrived = 0, False
        try:
            async for response in call:
                if receiver is None:
                    header = _checked_header(require(response, "a header").frame, blake3)
                    receiver, begun = self._receiver(path, header), header.offset
                elif isinstance(response, memoryview):
                    receiver.write(response)
                    self._metrics.moved(Direction.DOWN, len(response))
                else:
                    frame = require(response, "a chunk or a trailer").frame
                    if frame.WhichOneof("part") != "trailer":
                        raise ProtocolError("a frame that is neither chunk nor trailer amid a file")
                    arrived = True
                    await verified(receiver, frame.trailer.blake3)
                    return
            raise TruncatedError("the stream ended before its trailer; fetch the rest")
        finally:
            call.cancel()
            if receiver is not None:
                receiver.close()
                if arrived:
                    chunks.passed()
                else:
                    chunks.broke(gained=receiver.received - begun)

    def _receiver(self, path: Path, header: transfer_pb2.FileHeader) -> FileReceiver:
        return FileReceiver(
            path,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=self._maximum,
            over=None if header.offset else self._cache.spare.take(),
        )


def _checked_header(frame: transfer_pb2.ModelFrame, blake3: str) -> transfer_pb2.FileHeader:
    """The first frame's header. Raises ProtocolError unless it announces what was asked for."""
    header = frame.header
    announced, expected = (header.version, header.blake3), (FRAMING_VERSION, blake3)
    if frame.WhichOneof("part") != "header" or announced != expected:
        raise ProtocolError(
            f"the coordinator began a file with {announced}, expected a header with {expected}"
        )
    return header
