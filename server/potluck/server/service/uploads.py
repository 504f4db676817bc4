"""Updates on their way in: announced, received, verified, checked, handed to their run."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from potluck.common.errors import (
    LayoutError,
    ProtocolError,
    ProtocolVersionError,
    RoundClosedError,
    StorageError,
    TooLargeError,
    TruncatedError,
    UpdateError,
)
from potluck.common.learning.local_steps import LEAST_NORMALIZER, largest_normalizer
from potluck.common.learning.training import LocalTraining
from potluck.common.learning.update_report import UpdateReport
from potluck.common.metrics.metric_labels import MASKED as MASKED_LABEL
from potluck.common.metrics.metric_labels import Direction
from potluck.common.net.frames import require
from potluck.common.net.identity import Identity
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.shielded import to_the_end
from potluck.common.net.transfer import FileReceiver, check_digest, held_bytes
from potluck.common.tensors.finite_screen import FiniteScreen
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.server.aggregation.model_files import ModelVersion
from potluck.server.aggregation.update_files import SpooledUpdate
from potluck.server.hosts.instructions import ENCODINGS, MASKED
from potluck.server.rounds.events import Broke
from potluck.server.runs.update_inbox import UpdateInbox
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.coordinator_metrics import Transfer
from potluck.server.service.guard import check_client
from potluck.server.store.records import UpdateRow

_MOST_SAMPLES = 1 << 40


@dataclass(frozen=True)
class _Upload:
    """One update on its way. model: what it was trained from."""

    header: transfer_pb2.UpdateHeader
    inbox: UpdateInbox
    model: ModelVersion
    transfer: Transfer


class Uploads:
    """Takes what hosts submit. Lives on the event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By update; a lock is kept by those who hold it or wait for it."""

    async def locate(
        self, request: coordinator_pb2.LocateUploadRequest, identity: Identity
    ) -> coordinator_pb2.LocateUploadResponse:
        """How much of an update has arrived."""
        check_client(request.client_id, identity)
        inbox = await self._coordinator.runs.inbox_of(request.run_id, request.update_id)
        if inbox.has(request.client_id, request.update_id):
            return coordinator_pb2.LocateUploadResponse(complete=True)
        _check_expected(inbox, request.client_id, request.update_id)
        check_digest(request.blake3)
        held = held_bytes(inbox.spool_path(request.client_id, request.blake3))
        return coordinator_pb2.LocateUploadResponse(offset=held)

    async def take(
        self, frames: AsyncIterator[Any], identity: Identity
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """Take one update: its header, its chunks as views of their bytes, its trailer."""
        frames = aiter(frames)
        header = _header(await anext(frames, None))
        client = header.client_id
        check_client(client, identity)
        inbox = await self._coordinator.runs.inbox_of(header.run_id, header.update_id)
        if inbox.has(client, header.update_id):
            return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
        _check_expected(inbox, client, header.update_id)
        if inbox.masking is None:
            _check_report(UpdateReport.from_message(header.report), inbox.plan.training)
        _check_form(header, inbox)
        counted = self._coordinator.metrics.transfer(
            Direction.UP, identity.name, header.blake3, offset=header.offset
        )
        async with self._locks.setdefault(header.update_id, asyncio.Lock()):
            if inbox.has(client, header.update_id):  # it was being verified when it came again
                return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
            with counted as transfer, contextlib.ExitStack() as stack:
                upload = _Upload(header, inbox, inbox.model, transfer)
                with _spooling(upload):
                    receiver, blake3 = await self._receive(upload, frames, stack)
                # All of it is here: it counts even if its host goes away now.
                await to_the_end(_finish(upload, receiver, blake3))
        return coordinator_pb2.SubmitUpdateResponse()

    async def _receive(
        self, upload: _Upload, frames: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> tuple[FileReceiver, str]:
        """All bytes of a file, in a receiver that `stack` closes, and the digest in its trailer."""
        header, inbox = upload.header, upload.inbox
        async with self._coordinator.transfers.turn(upload.transfer):
            _check_expected(inbox, header.client_id, header.update_id)
            inbox.upload_begins()
            receiver = stack.enter_context(contextlib.closing(self._receiver(header, inbox)))
            async for frame in frames:
                if not isinstance(frame, memoryview):
                    return receiver, _trailer(frame).blake3
                receiver.write(frame)
                upload.transfer.moved += len(frame)
                inbox.count_up(len(frame))
        raise TruncatedError(
            f"the upload ended without a trailer after {receiver.received} of {header.size} bytes; "
            "send the rest",
            received=receiver.received,
            size=header.size,
        )

    def _receiver(self, header: transfer_pb2.UpdateHeader, inbox: UpdateInbox) -> FileReceiver:
        path = inbox.spool_path(header.client_id, header.blake3)
        inbox.spool.clear_others(path)
        return FileReceiver(
            path,
            blake3=header.blake3,
            size=header.size,
            offset=header.offset,
            maximum=min(inbox.work.largest_upload(), self._coordinator.config.maximum_model_bytes),
            over=None if header.offset else inbox.spool.take_spare(),
        )


@contextlib.contextmanager
def _spooling(upload: _Upload) -> Iterator[None]:
    """A disk that refuses an update ends the run: sending it again can't help."""
    inbox, folder = upload.inbox, upload.inbox.spool.folder
    try:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"can't spool an update to {folder}: {error.strerror}; make room there, or put it "
                "right, and resume the run",
                path=folder,
            ) from error
    except StorageError as error:
        _check_expected(inbox, upload.header.client_id, upload.header.update_id)
        inbox.post(Broke(error.message))
        raise


async def _finish(upload: _Upload, receiver: FileReceiver, blake3: str) -> None:
    """Verify a file that is whole, check what is in it, and hand it to its run."""
    header, inbox, screen = upload.header, upload.inbox, FiniteScreen()
    with _spooling(upload):
        path = await asyncio.to_thread(receiver.finish, blake3, see=screen.see)
        try:
            await _check(upload, path, finite=screen.clean)
        except (UpdateError, TooLargeError, ProtocolError) as error:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            if inbox.expects(header.client_id, header.update_id):
                inbox.fail(header.client_id, error.message, error.reason)
            raise
        _check_expected(inbox, header.client_id, header.update_id)
        update = SpooledUpdate(client=header.client_id, path=path, row=_row(header, inbox))
        await inbox.accept(header.client_id, header.update_id, update)
    upload.transfer.complete()


async def _check(upload: _Upload, path: Path, *, finite: bool) -> None:
    header, inbox = upload.header, upload.inbox
    if inbox.masking is not None:
        await asyncio.to_thread(inbox.masking.check, path)
        _check_expected(inbox, header.client_id, header.update_id)
        inbox.masking.vouch(header.client_id, header.masked_input, header.blake3)
        return
    await asyncio.to_thread(
        inbox.work.check_update,
        path,
        upload.model,
        compressed=header.compressed,
        finite=finite,
    )


def _row(header: transfer_pb2.UpdateHeader, inbox: UpdateInbox) -> UpdateRow:
    """What the store is told of an update."""
    up, masked = inbox.plan.run_file.transport.up, inbox.masking is not None
    # Whatever a masked update's report says is none of our business.
    report = UpdateReport() if masked else UpdateReport.from_message(header.report)
    report = replace(
        report,
        seconds=_seconds(inbox, header.client_id, report),
        reports=_reports(inbox, report),
    )
    return UpdateRow(
        blake3=header.blake3,
        size=header.size,
        encoding=MASKED_LABEL if masked else up.encoding.value,
        delta=header.delta,
        compressed=header.compressed,
        **report.values(),
    )


def _check_expected(inbox: UpdateInbox, client: str, update_id: str) -> None:
    if not inbox.expects(client, update_id):
        raise RoundClosedError(
            f"nobody waits for update '{update_id[:200]}' of client '{client}' any more; drop it",
            update=update_id[:200],
            client=client,
        )


def _header(first: Any) -> transfer_pb2.UpdateHeader:
    request = require(first, "an upload's header")
    if request.frame.WhichOneof("part") != "header":
        raise ProtocolError("the first frame of an upload must be its header")
    header: transfer_pb2.UpdateHeader = request.frame.header
    if header.version != FRAMING_VERSION:
        raise ProtocolVersionError(
            f"the upload is framed in version {header.version}, this coordinator reads "
            f"{FRAMING_VERSION}",
            version=header.version,
        )
    check_digest(header.blake3)
    return header


def _trailer(request: Any) -> transfer_pb2.FileTrailer:
    frame = require(request, "a chunk or a trailer").frame
    if frame.WhichOneof("part") != "trailer":
        raise ProtocolError("after an upload's header come chunks, then a trailer")
    trailer: transfer_pb2.FileTrailer = frame.trailer
    return trailer


def _check_form(header: transfer_pb2.UpdateHeader, inbox: UpdateInbox) -> None:
    up = inbox.plan.run_file.transport.up
    if inbox.masking is not None:
        if header.encoding != MASKED or not header.delta or header.compressed:
            raise LayoutError(
                "this run wants masked updates; the update announced is in another form"
            )
        return
    if (
        header.encoding != ENCODINGS[up.encoding]
        or header.delta != up.delta
        or (header.compressed and not up.compress)
    ):
        raise LayoutError(
            f"this run wants updates as {up.encoding}{' delta' if up.delta else ''}, "
            f"{'compressed or not' if up.compress else 'not compressed'}; the update announced "
            "is in another form"
        )


def _seconds(inbox: UpdateInbox, client: str, report: UpdateReport) -> float:
    """How long the client took: on a virtual clock it says so itself, else it is measured here."""
    if inbox.plan.run_file.virtual_clock.enabled:
        return report.seconds
    return inbox.seconds_since_instructed(client)


def _reports(inbox: UpdateInbox, report: UpdateReport) -> dict[str, float]:
    """What the selector wants to know, as far as it was reported and is a number."""
    return {
        name: report.reports[name]
        for name in sorted(inbox.plan.reports)
        if name in report.reports and math.isfinite(report.reports[name])
    }


def _check_report(report: UpdateReport, training: LocalTraining) -> None:
    if not 1 <= report.samples <= _MOST_SAMPLES:
        raise LayoutError(
            f"an update from {report.samples} samples can't be weighted; it must be from 1 to "
            f"{_MOST_SAMPLES}",
            samples=report.samples,
        )
    for name, value in report.not_finite().items():
        raise LayoutError(f"the update reports {value} as its {name}; it must be finite")
    if report.seconds < 0:
        raise LayoutError(
            f"the update reports {report.seconds} s of training; it can't be less than 0"
        )
    # Strategies weigh by steps, so they must be what such a client can have done.
    planned = training.planned_steps(report.samples)
    if report.steps > planned:
        raise LayoutError(
            f"an update from {report.samples} samples reports {report.steps} steps; this run "
            f"takes {planned} at most",
            steps=report.steps,
        )
    most = largest_normalizer(training, planned)
    if report.normalizer is not None and not LEAST_NORMALIZER <= report.normalizer <= most:
        raise LayoutError(
            f"an update reports that its {report.steps} steps amount to {report.normalizer}; it "
            f"must be from {LEAST_NORMALIZER} to {most:g}",
            normalizer=report.normalizer,
        )
