"""Delivering an update: as often as it takes, from where it broke off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import structlog
from google.protobuf.message import Message

from potluck.client.transfer.link import Link, calling
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.client.transfer.stored_upload import StoredUpload
from potluck.common.errors import (
    DigestMismatchError,
    NotFoundError,
    PotluckError,
    StorageError,
    TooLargeError,
    TransferError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import file_messages
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2, transfer_pb2

log = structlog.get_logger()

_ATTEMPTS = 3
"""Times that the coordinator may find another digest than announced."""


def may_help_to_retry(error: PotluckError) -> bool:
    """True where sending an update again may succeed: the way there broke, or the coordinator has
    a passing trouble. Wrong digests are counted apart."""
    if isinstance(error, TooLargeError):
        return False
    # NotFoundError: a coordinator that was restarted may know the run only a moment later. The
    # base class: the coordinator failed unexpectedly.
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
    """Bring an update to the coordinator; see `deliver_file`. members: of a sum, the updates in it,
    the one named first."""
    await deliver_file(link, header_of(update, members), path, fresh=fresh)


async def deliver_file(
    link: Link, header: transfer_pb2.UpdateHeader, path: Path, *, fresh: bool
) -> None:
    """Bring the file that a header announces to the coordinator; returns when it is verified and
    kept there.

    `fresh`: nothing of it has been sent before. Goes on trying until it is cancelled. Raises
    RoundClosedError when the update is not wanted any more, UpdateError, IdentityError,
    ProtocolError or TooLargeError when it is refused for good, DigestMismatchError after three
    wrong digests, StorageError if the file is gone or can't be read.
    """
    _require(path)
    backoff, chunks = link.backoff(), link.chunks[Direction.UP]
    stored = StoredUpload(link, path, fresh=fresh)
    mismatches = 0
    offset: int | None = 0 if fresh else None
    begun: int | None = None  # where the attempt that broke had begun
    own: list[StorageError] = []
    while True:
        try:
            async with link.transfers:
                with calling():
                    if stored.through_store:
                        offset = await stored.attempt(header)
                        if offset is None:
                            return
                    if offset is None:
                        located = await link.stub.LocateUpload(location_of(header))
                        if located.complete:
                            return
                        offset = min(located.offset, header.size)
                    if begun is not None:
                        chunks.broke(gained=offset - begun)
                        if offset > begun:
                            backoff.reset()
                    begun = offset
                    await link.submit_update(_frames(header, path, offset, link, own))
                    chunks.passed()
                    return
        except PotluckError as error:
            failure = error
        if own:
            raise own[0] from None
        offset = None
        if stored.failed(failure):
            begun, mismatches = None, 0
        elif isinstance(failure, DigestMismatchError):
            offset, begun, mismatches = 0, None, mismatches + 1
        if not may_help_to_retry(failure) or mismatches == _ATTEMPTS:
            raise failure
        log.info("upload interrupted", update=header.update_id, error=failure.message)
        await link.pause(backoff.next_seconds())
        link.metrics.retried(Direction.UP)


def _require(path: Path) -> None:
    if not path.is_file():
        raise StorageError(f"the update {path} is gone; don't delete files of a running client")


def location_of(header: transfer_pb2.UpdateHeader) -> rpc.LocateUploadRequest:
    """The question how much of the file that a header announces has arrived."""
    return rpc.LocateUploadRequest(
        update_id=header.update_id,
        run_id=header.run_id,
        client_id=header.client_id,
        blake3=header.blake3,
    )


async def _frames(
    header: transfer_pb2.UpdateHeader,
    path: Path,
    offset: int,
    link: Link,
    own: list[StorageError],
) -> AsyncIterator[Message | bytes]:
    """One header, the file from `offset` in chunks, one trailer.

    own: receives the error of this host's disk; gRPC reports a cancelled call instead.
    """
    opening = transfer_pb2.UpdateHeader()
    opening.CopyFrom(header)
    opening.offset = offset
    opening.stored = False
    yield _request(transfer_pb2.UpdateFrame(header=opening))
    chunk_bytes = link.chunks[Direction.UP].bytes
    try:
        for message in file_messages(path, offset, chunk_bytes=chunk_bytes):
            link.metrics.moved(Direction.UP, len(message))
            yield message
    except StorageError as error:
        own.append(error)
        raise
    trailer = transfer_pb2.FileTrailer(blake3=header.blake3)
    yield _request(transfer_pb2.UpdateFrame(trailer=trailer))


def _request(frame: transfer_pb2.UpdateFrame) -> rpc.SubmitUpdateRequest:
    return rpc.SubmitUpdateRequest(frame=frame)


def header_of(update: KeptUpdate, members: Sequence[KeptUpdate] = ()) -> transfer_pb2.UpdateHeader:
    """What announces an update, or a sum of these members, from its start."""
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
