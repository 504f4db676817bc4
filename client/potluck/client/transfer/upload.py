"""Delivery of an update, with retries that resume after interruptions."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import structlog
from google.protobuf.message import Message

from potluck.client.base.backoff import Backoff
from potluck.client.transfer.link import Link, calling
from potluck.client.transfer.object_stores import FileRoute
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.common.errors import (
    DigestMismatchError,
    NotFoundError,
    PotluckError,
    StorageError,
    TooLargeError,
    TransferError,
    TruncatedError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import file_messages
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.tensors.tensor_files import file_digest
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2, transfer_pb2

# Directly -----------------------------------------------------------------------------------------

_LEAST_HEADERS = 4
"""Minimum size of a piece, in multiples of its header's bytes."""


class DirectUpload:
    """The upload of one file. Runs on the event loop."""

    def __init__(
        self,
        link: Link,
        header: transfer_pb2.UpdateHeader,
        path: Path,
        backoff: Backoff,
        *,
        fresh: bool,
    ) -> None:
        """fresh: True if no part of the file has been sent before. backoff: the pauses between
        attempts; they start again from the first whenever bytes arrive."""
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
        """Offset of the piece whose transfer broke off, and its duration in seconds."""

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
        """Forget the last interruption, because the file was sent through a store since then."""
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


# Through an object store --------------------------------------------------------------------------


class StoredUpload:
    """One update and its route. fresh: True if no part of it has been uploaded before."""

    def __init__(self, link: Link, path: Path, *, fresh: bool) -> None:
        self._link = link
        self._path = path
        self._put = not fresh
        self._sha256 = ""
        self._route = FileRoute(link.stores)

    @property
    def through_store(self) -> bool:
        """True if the next attempt goes through a store."""
        return self._route.through_store

    def failed(self, error: PotluckError) -> bool:
        """Record a failed attempt; return the result of `FileRoute.failed`."""
        if isinstance(error, DigestMismatchError):
            self._put = False
        return self._route.failed(error)

    async def attempt(self, announced: transfer_pb2.UpdateHeader) -> int | None:
        """Deliver the announced update. Returns None once the coordinator has it.

        Otherwise returns the offset from which the update must be sent directly. Raises
        ObjectStoreError, and what the coordinator raises.
        """
        if not self._sha256:
            self._sha256 = await asyncio.to_thread(_sha256_of, self._path)
        header = transfer_pb2.UpdateHeader()
        header.CopyFrom(announced)
        header.stored = self._put
        request = rpc.LocateUploadRequest(
            update_id=header.update_id,
            run_id=header.run_id,
            client_id=header.client_id,
            blake3=header.blake3,
            header=header,
            sha256=self._sha256,
        )
        located = await self._link.stub.LocateUpload(request)
        if located.complete:
            return None
        if not located.HasField("place"):
            return min(located.offset, header.size)
        url = self._route.url(located.place)
        if not (located.stored and self._put):
            await self._link.stores.put(url, self._path, size=header.size, sha256=self._sha256)
            self._put = True
        header.stored = True
        await self._link.submit_update(_announcing(header))
        self._route.worked()
        return None


async def _announcing(header: transfer_pb2.UpdateHeader) -> AsyncIterator[rpc.SubmitUpdateRequest]:
    yield rpc.SubmitUpdateRequest(frame=transfer_pb2.UpdateFrame(header=header))


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Delivery -----------------------------------------------------------------------------------------

log = structlog.get_logger()

_ATTEMPTS = 3
"""Maximum number of uploads of a file for which the coordinator reports a wrong digest."""


def may_help_to_retry(error: PotluckError) -> bool:
    """Return True if sending an update again may succeed: the connection broke, or the
    coordinator's failure is temporary.

    Wrong digests are counted separately.
    """
    if isinstance(error, TooLargeError):
        return False
    # NotFoundError may pass: a restarted coordinator may know the run only a moment later.
    # PotluckError itself: the coordinator failed unexpectedly.
    passing = (UnreachableError, TransferError, StorageError, NotFoundError)
    return isinstance(error, passing) or type(error) is PotluckError


async def deliver(
    link: Link,
    update: KeptUpdate,
    path: Path,
    *,
    fresh: bool,
    members: Sequence[KeptUpdate] = (),
) -> None:
    """Deliver an update to the coordinator; see `deliver_file`.

    members: the updates in a sum, starting with `update`; empty for a single update."""
    await deliver_file(link, header_of(update, members), path, fresh=fresh)


async def deliver_file(
    link: Link, header: transfer_pb2.UpdateHeader, path: Path, *, fresh: bool
) -> None:
    """Deliver an announced file to the coordinator; return once it is verified and kept there.

    `fresh`: True if no part of it has been sent before. Tries again until it is cancelled. Raises
    RoundClosedError if the update is no longer wanted; UpdateError, IdentityError, ProtocolError or
    TooLargeError if the coordinator's refusal is final; DigestMismatchError after three wrong
    digests; StorageError if the file is missing or can't be read.
    """
    _require(path)
    backoff = link.backoff()
    direct = DirectUpload(link, header, path, backoff, fresh=fresh)
    stored = StoredUpload(link, path, fresh=fresh)
    mismatches = 0
    while True:
        try:
            async with link.transfers:
                with calling():
                    if stored.through_store and await stored.attempt(header) is None:
                        return
                    await direct.attempt()
                    return
        except PotluckError as error:
            failure = error
        if direct.unreadable is not None:
            raise direct.unreadable
        mismatched = isinstance(failure, DigestMismatchError)
        if stored.failed(failure):
            if mismatched:
                await _check_own(path, header)
            direct.failed()
            direct.forget()
            mismatches = 0
        else:
            direct.failed(again=mismatched)
            mismatches += mismatched
        if not may_help_to_retry(failure) or mismatches == _ATTEMPTS:
            raise failure
        log.info("upload interrupted", update=header.update_id, error=failure.message)
        await link.pause(backoff.next_seconds())
        link.metrics.retried(Direction.UP)


def _require(path: Path) -> None:
    if not path.is_file():
        raise StorageError(
            f"the update's file {path} was deleted; don't delete files of a running host"
        )


async def _check_own(path: Path, header: transfer_pb2.UpdateHeader) -> None:
    """Raise StorageError if this host's file does not have the announced digest."""
    found = await asyncio.to_thread(file_digest, path)
    if found.blake3 != header.blake3:
        raise StorageError(
            f"the update's file {path} is damaged; check the disk of this host", path=path
        )


def header_of(update: KeptUpdate, members: Sequence[KeptUpdate] = ()) -> transfer_pb2.UpdateHeader:
    """Return the header that announces an update, or a sum of these members."""
    word: secure_aggregation_pb2.SecureEnvelope | None = None
    if update.masked_input:
        word = secure_aggregation_pb2.SecureEnvelope.FromString(bytes.fromhex(update.masked_input))
    return transfer_pb2.UpdateHeader(
        version=FRAMING_VERSION,
        update_id=update.update_id,
        run_id=update.run_id,
        client_id=update.client_id,
        blake3=update.blake3,
        size=update.size,
        encoding=transfer_pb2.Encoding.ValueType(update.encoding),
        delta=update.delta,
        compressed=update.compressed,
        masked_input=word,
        report=None if members else update.report.message(),
        members=[
            transfer_pb2.SumMember(
                client_id=each.client_id, update_id=each.update_id, report=each.report.message()
            )
            for each in members
        ],
    )
