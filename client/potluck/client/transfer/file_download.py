"""Downloads of single files, directly from the coordinator or through an object store."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from potluck.client.base.state_directory import storage_error
from potluck.client.transfer.link import Link, calling
from potluck.client.transfer.object_stores import FileRoute
from potluck.common.errors import (
    DigestMismatchError,
    ProtocolError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import require
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes, part_path, verified
from potluck.common.tensors.spare_files import SpareFiles
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

_ATTEMPTS = 3
"""Maximum number of times that a file may arrive with a wrong digest."""

_STALE_SECONDS = 24 * 3600.0


class FileDownloads:
    """Fetches files into a folder, resuming interrupted attempts.

    Runs on the event loop; blocking work runs in threads. Only one download of a file may run at a
    time.
    """

    def __init__(self, link: Link, folder: Path, *, maximum_bytes: int, spare: SpareFiles) -> None:
        """`folder`: holds unfinished downloads, also from earlier processes. `spare`:
        files that may be overwritten."""
        self._link = link
        self._folder = folder
        self._maximum = maximum_bytes
        self._spare = spare
        for path in folder.iterdir():
            if path.suffix != ".part" or path.stat().st_mtime < time.time() - _STALE_SECONDS:
                path.unlink()

    def path(self, blake3: str) -> Path:
        """Return the path of a fetched file. Raises ProtocolError for an invalid digest."""
        return self._folder / check_digest(blake3)

    async def fetch(self, blake3: str, size: int | None = None) -> Path:
        """Fetch a whole file, in as many attempts as needed; return its path.

        The caller moves the file away. size: length in bytes, if known. Retries while the
        coordinator can't be reached. Raises DigestMismatchError, NotFoundError, TooLargeError,
        ProtocolError or StorageError.
        """
        path = self.path(blake3)
        backoff, route = self._link.backoff(), FileRoute(self._link.stores)
        mismatches = 0
        while True:
            begun = held_bytes(path)
            try:
                async with self._link.transfers:
                    with calling():
                        await self._attempt(blake3, size, path, route)
                        return path
            except (UnreachableError, TruncatedError) as error:
                route.failed(error)
                log.info("download interrupted", file=blake3, error=error.message)
                if held_bytes(path) > begun:
                    backoff.reset()
            except DigestMismatchError as error:
                mismatches = 0 if route.failed(error) else mismatches + 1
                if mismatches == _ATTEMPTS:
                    raise
            except OSError as error:
                # the disk is full: free the space of the part
                part_path(path).unlink(missing_ok=True)
                raise storage_error(path, error) from error
            await self._link.pause(backoff.next_seconds())
            self._link.metrics.retried(Direction.DOWN)

    async def _attempt(self, blake3: str, size: int | None, path: Path, route: FileRoute) -> None:
        """Make one attempt, resuming after the bytes that are already here."""
        place = await self._stream_or_place(blake3, size, path, route)
        if place is not None:
            await self._from_store(blake3, size, path, route, place)

    async def _from_store(
        self,
        blake3: str,
        size: int | None,
        path: Path,
        route: FileRoute,
        place: transfer_pb2.StoredFile,
    ) -> None:
        """Make one attempt through an object store."""
        if size is None:
            raise ProtocolError("a file of unknown length can't be fetched from an object store")
        url = route.url(place)
        header = transfer_pb2.FileHeader(blake3=blake3, size=size)

        def begin(offset: int) -> FileReceiver:
            header.offset = offset
            return self._receiver(path, header)

        held = held_bytes(path)
        offset = held if held < size else 0  # begin at 0 if no bytes are left to request
        await self._link.stores.fetch(url, begin, offset=offset)
        route.worked()

    async def _stream_or_place(
        self, blake3: str, size: int | None, path: Path, route: FileRoute
    ) -> transfer_pb2.StoredFile | None:
        """Make one attempt directly from the coordinator.

        Returns the file's location if the coordinator sends that instead of the file."""
        request = rpc.CoordinatorServiceFetchModelRequest(
            blake3=blake3, from_store=route.through_store, distrust=route.distrust
        )
        while True:
            held, limit = held_bytes(path), self._link.pieces[Direction.DOWN].bytes
            request.offset = held if size is None else min(held, size)
            request.limit = limit
            request.chunk_bytes = self._link.chunk_bytes(Direction.DOWN, limit)
            place, whole = await self._piece(request, size, path)
            if whole or place is not None:
                return place

    async def _piece(
        self, request: rpc.CoordinatorServiceFetchModelRequest, size: int | None, path: Path
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Fetch one piece of a file; return (None, True if the file is now complete).

        Returns (location, False) if the coordinator sends a location instead."""
        blake3 = request.blake3
        chunks, pieces = self._link.chunks[Direction.DOWN], self._link.pieces[Direction.DOWN]
        call = self._link.fetch_model(request)
        receiver: FileReceiver | None = None
        begun, since, arrived = 0, time.monotonic(), False
        try:
            async for response in call:
                if receiver is None and request.from_store:
                    place = _place(require(response, "a header").frame)
                    if place is not None:
                        return place, False
                if receiver is None:
                    frame = require(response, "a header").frame
                    header = _checked_header(frame, blake3, size)
                    receiver, begun = self._receiver(path, header), header.offset
                    since = time.monotonic()
                elif isinstance(response, memoryview):
                    receiver.write(response)
                    self._link.metrics.moved(Direction.DOWN, len(response))
                else:
                    frame = require(response, "a chunk or a trailer").frame
                    part = frame.WhichOneof("part")
                    if part != "trailer":
                        raise ProtocolError(
                            f"received a frame of the kind '{part or 'empty'}' in the middle of a "
                            "file; expected a chunk or a trailer"
                        )
                    arrived = True
                    await verified(receiver, frame.trailer.blake3)
                    return None, True
            if receiver is not None and receiver.received - begun == request.limit:
                arrived = True
                pieces.confirmed(request.limit, time.monotonic() - since)
                return None, False
            raise TruncatedError("the stream ended before its trailer; fetch the rest")
        finally:
            call.cancel()
            if receiver is not None:
                receiver.close()
                if arrived:
                    chunks.passed()
                else:
                    gained = receiver.received - begun
                    chunks.broke(gained=gained)
                    pieces.broke(gained, time.monotonic() - since)

    def _receiver(self, path: Path, header: transfer_pb2.FileHeader) -> FileReceiver:
        return FileReceiver(
            path,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=self._maximum,
            over=None if header.offset else self._spare.take(),
        )


def _place(frame: transfer_pb2.ModelFrame) -> transfer_pb2.StoredFile | None:
    """Return the file's location in a store; None for a frame of the file itself."""
    return frame.elsewhere if frame.HasField("elsewhere") else None


def _checked_header(
    frame: transfer_pb2.ModelFrame, blake3: str, size: int | None
) -> transfer_pb2.FileHeader:
    """Return the first frame's header. Raises ProtocolError unless it is of the requested file."""
    header = frame.header
    announced = (header.version, header.blake3, header.size)
    expected = (FRAMING_VERSION, blake3, header.size if size is None else size)
    if frame.WhichOneof("part") != "header" or announced != expected:
        raise ProtocolError(
            f"the first frame of the file is {announced}; expected a header with {expected}"
        )
    return header
