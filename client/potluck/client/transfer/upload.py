"""Delivery of an update, with retries that resume after interruptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from potluck.client.transfer.direct_upload import DirectUpload
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
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.tensors.tensor_files import file_digest
from potluck.rpc.v1 import secure_aggregation_pb2, transfer_pb2

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
    # NotFoundError: a restarted coordinator may know the run only a moment later. PotluckError
    # itself: the coordinator failed unexpectedly.
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

    members: for a sum, the updates in it, starting with `update`."""
    await deliver_file(link, header_of(update, members), path, fresh=fresh)


async def deliver_file(
    link: Link, header: transfer_pb2.UpdateHeader, path: Path, *, fresh: bool
) -> None:
    """Deliver an announced file to the coordinator; return once it is verified and kept there.

    `fresh`: True if no part of it has been sent before. Tries again until it is cancelled. Raises
    RoundClosedError if the update is no longer wanted; UpdateError, IdentityError, ProtocolError or
    TooLargeError if it is refused for good; DigestMismatchError after three wrong digests;
    StorageError if the file is missing or can't be read.
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
        raise StorageError(f"the update {path} is gone; don't delete files of a running client")


async def _check_own(path: Path, header: transfer_pb2.UpdateHeader) -> None:
    """Raise StorageError if this host's file does not have the announced digest."""
    found = await asyncio.to_thread(file_digest, path)
    if found.blake3 != header.blake3:
        raise StorageError(f"the update {path} is damaged; see this host's disk", path=path)


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
