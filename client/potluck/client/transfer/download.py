"""Getting a round's model: from the cache, or from the coordinator, once for all clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from potluck.client.base.state_directory import storage_error
from potluck.client.training.update_encoding import decode_model
from potluck.client.transfer.link import Link, calling
from potluck.client.transfer.model_cache import ModelCache
from potluck.client.transfer.object_stores import FileRoute
from potluck.common.errors import (
    DigestMismatchError,
    NotFoundError,
    ProtocolError,
    TooLargeError,
    TransferError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import require
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.shielded import shielded
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, part_path, verified
from potluck.common.tensors.layout import Layout
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

LayoutSource = Callable[[], Awaitable[Layout]]
"""Gives the layout of the task's model; only needed for some encodings."""

_ATTEMPTS = 3
"""Times that a file may arrive with a wrong digest."""

_STALE_SECONDS = 24 * 3600.0


class Downloads:
    """Fetches models into the cache. Lives on the event loop; blocking work goes to threads."""

    def __init__(self, link: Link, cache: ModelCache, folder: Path, *, maximum_bytes: int) -> None:
        """`folder` is where files wait on their way; parts of an earlier process are kept."""
        self._link = link
        self.cache = cache
        self._folder = folder
        self._maximum = maximum_bytes
        self._under_way: dict[str, asyncio.Task[Path]] = {}
        self._waiting: Counter[str] = Counter()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By model; a download that was given up keeps its lock until its thread has ended."""
        for path in folder.iterdir():
            if path.suffix != ".part" or path.stat().st_mtime < time.time() - _STALE_SECONDS:
                path.unlink()

    async def obtain(self, reference: transfer_pb2.ModelReference, layout: LayoutSource) -> Path:
        """The file of a model, fetched if it is not here; pin it in the cache meanwhile.

        Clients that want the same model share one download; it is given up when none of them
        waits any more. Goes on trying for as long as the coordinator can't be reached. Raises
        DigestMismatchError, NotFoundError, TooLargeError, ProtocolError or StorageError.
        """
        blake3 = check_digest(reference.blake3)
        task = self._under_way.get(blake3)
        if task is None:
            task = asyncio.create_task(self._obtain_alone(reference, layout))
            self._under_way[blake3] = task
            task.add_done_callback(lambda done: self._forget(blake3, done))
        self._waiting[blake3] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[blake3] -= 1
            if not self._waiting[blake3]:
                del self._waiting[blake3]
                if not task.done():
                    self._forget(blake3, task)
                    task.cancel()

    def _forget(self, blake3: str, task: asyncio.Task[Path]) -> None:
        if self._under_way.get(blake3) is task:
            del self._under_way[blake3]

    async def _obtain_alone(
        self, reference: transfer_pb2.ModelReference, layout: LayoutSource
    ) -> Path:
        async with self._locks.setdefault(reference.blake3, asyncio.Lock()):
            return await self._obtain(reference, layout)

    async def _obtain(self, reference: transfer_pb2.ModelReference, layout: LayoutSource) -> Path:
        blake3 = reference.blake3
        if await self._held(blake3):
            self.cache.touch(blake3)
            return self.cache.path(blake3)
        if reference.size > self._maximum:
            raise _too_large(reference.size, self._maximum)
        trouble: TransferError | NotFoundError | None = None
        for rendition in reference.renditions:
            base = rendition.base_blake3
            with self.cache.pinned(base or blake3):
                if base and not await self._held(base):
                    continue
                try:
                    return await self._fetch(reference, rendition, layout)
                except (TransferError, NotFoundError) as error:
                    if isinstance(error, TooLargeError):
                        raise
                    log.warning("model file unusable", model=blake3, error=error.message)
                    trouble = error
        raise trouble or ProtocolError(
            f"none of the {len(reference.renditions)} files offered for model {blake3[:12]}… can "
            "be used here; the last must be a whole model",
            blake3=blake3,
        )

    async def _held(self, blake3: str) -> bool:
        if not self.cache.holds(blake3):
            return False
        if await asyncio.to_thread(self.cache.verified, blake3):
            return True
        log.warning("cached model is corrupt, deleting it", model=blake3)
        self.cache.remove(blake3)
        return False

    async def _fetch(
        self,
        reference: transfer_pb2.ModelReference,
        rendition: transfer_pb2.Rendition,
        layout: LayoutSource,
    ) -> Path:
        """Fetch one rendition, decode it, verify the model, put it into the cache."""
        self.cache.make_room()
        target = self.cache.path(reference.blake3)
        fetched = self._folder / check_digest(rendition.blake3)
        try:
            await self._fetch_file(rendition, fetched)
            if rendition.blake3 == reference.blake3:
                fetched.replace(target)
            else:
                base = rendition.base_blake3
                decoding = asyncio.to_thread(
                    decode_model,
                    fetched,
                    target,
                    blake3=reference.blake3,
                    encoding=rendition.encoding,
                    compressed=rendition.compressed,
                    maximum_bytes=self._maximum,
                    base=self.cache.path(base) if base else None,
                    layout=None if base else await layout(),
                )
                await shielded(decoding)
        finally:
            fetched.unlink(missing_ok=True)
        self.cache.add(reference.blake3)
        return target

    async def _fetch_file(self, rendition: transfer_pb2.Rendition, path: Path) -> None:
        """Fetch a file whole, however often it takes."""
        backoff, route = self._link.backoff(), FileRoute(self._link.stores)
        mismatches = 0
        while True:
            begun = held_bytes(path)
            try:
                async with self._link.transfers:
                    with calling():
                        await self._stream(rendition, path, route)
                        return
            except (UnreachableError, TruncatedError) as error:
                route.failed(error)
                log.info("download interrupted", file=rendition.blake3, error=error.message)
                if held_bytes(path) > begun:
                    backoff.reset()
            except DigestMismatchError as error:
                mismatches = 0 if route.failed(error) else mismatches + 1
                if mismatches == _ATTEMPTS:
                    raise
            except OSError as error:
                part_path(path).unlink(missing_ok=True)  # on a full disk it is in everyone's way
                raise storage_error(path, error) from error
            await self._link.pause(backoff.next_seconds())
            self._link.metrics.retried(Direction.DOWN)

    async def _stream(
        self, rendition: transfer_pb2.Rendition, path: Path, route: FileRoute
    ) -> None:
        """One attempt, from where the last one broke off."""
        place = await self._stream_or_place(rendition, path, route)
        if place is not None:
            await self._from_store(rendition, path, route, route.url(place))

    async def _from_store(
        self, rendition: transfer_pb2.Rendition, path: Path, route: FileRoute, url: str
    ) -> None:
        """One attempt through an object store."""
        header = transfer_pb2.FileHeader(blake3=rendition.blake3, size=rendition.size)

        def begin(offset: int) -> FileReceiver:
            header.offset = offset
            return self._receiver(path, header)

        held = held_bytes(path)
        offset = held if held < rendition.size else 0  # there is nothing to ask for at the end
        await self._link.stores.fetch(url, begin, offset=offset)
        route.worked()

    async def _stream_or_place(
        self, rendition: transfer_pb2.Rendition, path: Path, route: FileRoute
    ) -> transfer_pb2.StoredFile | None:
        """One attempt straight from the coordinator, or where else it says that the file is."""
        offset = min(held_bytes(path), rendition.size)
        chunks = self._link.chunks[Direction.DOWN]
        request = rpc.CoordinatorServiceFetchModelRequest(
            blake3=rendition.blake3,
            offset=offset,
            chunk_bytes=chunks.bytes,
            from_store=route.through_store,
            distrust=route.distrust,
        )
        call = self._link.fetch_model(request)
        receiver: FileReceiver | None = None
        begun, arrived = 0, False
        try:
            async for response in call:
                if receiver is None and request.from_store:
                    place = _place(require(response, "a header").frame)
                    if place is not None:
                        return place
                if receiver is None:
                    header = _checked_header(require(response, "a header").frame, rendition)
                    receiver, begun = self._receiver(path, header), header.offset
                elif isinstance(response, memoryview):
                    receiver.write(response)
                    self._link.metrics.moved(Direction.DOWN, len(response))
                else:
                    frame = require(response, "a chunk or a trailer").frame
                    part = frame.WhichOneof("part")
                    if part != "trailer":
                        raise ProtocolError(f"a {part or 'empty'} frame amid a model file")
                    arrived = True
                    await verified(receiver, frame.trailer.blake3)
                    return None
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
            over=None if header.offset else self.cache.spare.take(),
        )


def _place(frame: transfer_pb2.ModelFrame) -> transfer_pb2.StoredFile | None:
    """Where else the file is; None for a frame of the file itself."""
    return frame.elsewhere if frame.HasField("elsewhere") else None


def _checked_header(
    frame: transfer_pb2.ModelFrame, rendition: transfer_pb2.Rendition
) -> transfer_pb2.FileHeader:
    """The first frame's header. Raises ProtocolError unless it announces what was asked for."""
    header = frame.header
    announced = (header.version, header.blake3, header.size)
    expected = (FRAMING_VERSION, rendition.blake3, rendition.size)
    if frame.WhichOneof("part") != "header" or announced != expected:
        raise ProtocolError(
            f"the coordinator began a file with {announced}, expected a header with {expected}"
        )
    return header


def _too_large(size: int, maximum: int) -> TooLargeError:
    return TooLargeError(
        f"the model has {size} bytes, this host accepts {maximum}; raise maximum_model_bytes",
        size=size,
        maximum=maximum,
    )
