"""Upload of one file directly to the coordinator: piece by piece, resumed after interruptions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

from google.protobuf.message import Message

from potluck.client.base.backoff import Backoff
from potluck.client.transfer.link import Link
from potluck.common.errors import StorageError, TruncatedError
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import file_messages
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

_LEAST_HEADERS = 4
"""Minimum size of a piece, in multiples of its header's bytes."""


class DirectUpload:
    """The upload of one file. Lives on the event loop."""

    def __init__(
        self,
        link: Link,
        header: transfer_pb2.UpdateHeader,
        path: Path,
        backoff: Backoff,
        *,
        fresh: bool,
    ) -> None:
        """fresh: True if no part of the file has been sent before. backoff: the pauses, which start
        again from the first whenever bytes arrive."""
        self._link = link
        self._header = header
        self._path = path
        self._backoff = backoff
        self.unreadable: StorageError | None = None
        """The disk error that ended the last call; None if there was none. gRPC would only report a
        cancelled call.
        """
        self._offset: int | None = 0 if fresh else None
        self._sequence = 1 if fresh else 0
        self._piece: tuple[int, float] | None = None
        """Offset and start time of the piece that is being sent."""
        self._broke: tuple[int, float] | None = None
        """Offset of the piece that broke, and the seconds that it took."""

    async def attempt(self) -> None:
        """Send the rest of the file; return once the coordinator has all of it.

        Raises the error with which the coordinator answers."""
        offset = await self._locate() if self._offset is None else self._offset
        while offset is not None:
            offset = await self._send_piece(offset)

    def failed(self, *, again: bool = False) -> None:
        """Note a failed attempt. again: True if the whole file must be sent again."""
        if again:
            self._offset, self._piece, self._broke = 0, None, None
            self._sequence += 1
            return
        self._offset = None
        if self._piece is not None:
            begun, at = self._piece
            self._broke = (begun, time.monotonic() - at)
            self._piece = None

    def forget(self) -> None:
        """Forget the last interruption, since the file has taken another route meanwhile."""
        self._piece = self._broke = None

    async def _locate(self) -> int | None:
        """Return the offset to resume from; None if the coordinator has the whole file."""
        request = location_of(self._header)
        request.resume = True
        located = await self._link.stub.LocateUpload(request)
        if located.complete:
            return None
        offset, self._sequence = min(located.offset, self._header.size), located.sequence
        if self._broke is not None:
            begun, seconds = self._broke
            self._broke = None
            self._link.chunks[Direction.UP].broke(gained=offset - begun)
            self._link.pieces[Direction.UP].broke(max(0, offset - begun), seconds)
            if offset > begun:
                self._backoff.reset()
        return offset

    async def _send_piece(self, offset: int) -> int | None:
        """Send the next piece; return the offset of the one after it, or None after the last."""
        size, pieces = self._header.size, self._link.pieces[Direction.UP]
        until = offset + max(pieces.bytes, _LEAST_HEADERS * self._header.ByteSize())
        until = until if until < size else 0
        begun = time.monotonic()
        self._piece = (offset, begun)
        answer: rpc.SubmitUpdateResponse = await self._link.submit_update(
            self._frames(offset, until)
        )
        self._piece = None
        self._sequence += 1
        if not until or answer.duplicate:
            self._link.chunks[Direction.UP].passed()
            return None
        if answer.received != until:
            raise TruncatedError(
                f"the coordinator received {answer.received} bytes of a file, but {until} were sent"
            )
        seconds = time.monotonic() - begun
        pieces.confirmed(until - offset, seconds - min(seconds, max(0.0, answer.waited_seconds)))
        self._backoff.reset()
        return until

    async def _frames(self, offset: int, until: int) -> AsyncIterator[Message | bytes]:
        """Yield a header and a piece of the file in chunks; after the last piece, a trailer."""
        opening = transfer_pb2.UpdateHeader()
        opening.CopyFrom(self._header)
        opening.offset, opening.until, opening.sequence = offset, until, self._sequence
        opening.stored = False
        yield _request(transfer_pb2.UpdateFrame(header=opening))
        end = until or opening.size
        chunk_bytes = self._link.chunk_bytes(Direction.UP, end - offset)
        try:
            for message in file_messages(self._path, offset, chunk_bytes=chunk_bytes, end=end):
                self._link.metrics.moved(Direction.UP, len(message))
                yield message
        except StorageError as error:
            self.unreadable = error
            raise
        if not until:
            trailer = transfer_pb2.FileTrailer(blake3=opening.blake3)
            yield _request(transfer_pb2.UpdateFrame(trailer=trailer))


def location_of(header: transfer_pb2.UpdateHeader) -> rpc.LocateUploadRequest:
    """Return the request that asks how much of an announced file has arrived."""
    return rpc.LocateUploadRequest(
        update_id=header.update_id,
        run_id=header.run_id,
        client_id=header.client_id,
        blake3=header.blake3,
    )


def _request(frame: transfer_pb2.UpdateFrame) -> rpc.SubmitUpdateRequest:
    return rpc.SubmitUpdateRequest(frame=frame)
