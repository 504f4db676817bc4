"""Receives and verifies updates, and passes them to their run's inbox."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from potluck.common.errors import (
    DigestMismatchError,
    ObjectStoreError,
    ProtocolError,
    TruncatedError,
)
from potluck.common.interruptible import shielded
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.frames import checked_header, update_header, update_trailer
from potluck.common.net.identity import Identity
from potluck.common.net.transfer import FileReceiver, check_digest
from potluck.common.tensors.finite_screen import FiniteScreen
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.coordinator_metrics import Transfer
from potluck.server.service.guard import check_client
from potluck.server.service.upload_order import UploadOrder
from potluck.server.store.model_files import ModelVersion
from potluck.server.updates.update_inbox import UpdateInbox, members_of
from potluck.server.updates.update_path import ReceivedUpdate


@dataclass(frozen=True)
class _Upload:
    """An update that is being received. model: the model from which the client started. arrived:
    monotonic time when the header arrived."""

    header: transfer_pb2.UpdateHeader
    inbox: UpdateInbox
    model: ModelVersion
    transfer: Transfer
    arrived: float

    @property
    def is_piece(self) -> bool:
        """True if the stream ends before the file does."""
        return self.header.until != 0


class Uploads:
    """Receives updates from hosts, and verifies them. Used on the event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._order = UploadOrder()

    async def locate(
        self, request: coordinator_pb2.LocateUploadRequest, identity: Identity
    ) -> coordinator_pb2.LocateUploadResponse:
        """Return how many bytes of an update have arrived."""
        check_client(request.client_id, identity)
        inbox = await self._coordinator.runs.inbox_of(request.run_id, request.update_id)
        if inbox.has(request.client_id, request.update_id, request.blake3):
            return coordinator_pb2.LocateUploadResponse(complete=True)
        inbox.require(request.client_id, request.update_id)
        check_digest(request.blake3)
        if request.resume:
            return await self._resume(request, inbox)
        held = inbox.held_bytes(request.client_id, request.update_id, request.blake3)
        place, there = await self._place(request, inbox, identity)
        return coordinator_pb2.LocateUploadResponse(offset=held, place=place, stored=there)

    async def _resume(
        self, request: coordinator_pb2.LocateUploadRequest, inbox: UpdateInbox
    ) -> coordinator_pb2.LocateUploadResponse:
        """End older streams of an update. Return how many bytes of the update have arrived."""
        client, update_id, blake3 = request.client_id, request.update_id, request.blake3
        async with self._order.resumed(update_id, blake3) as sequence:
            if inbox.has(client, update_id, blake3):  # the update was verified meanwhile
                return coordinator_pb2.LocateUploadResponse(complete=True)
            held = inbox.held_bytes(client, update_id, blake3)
            return coordinator_pb2.LocateUploadResponse(offset=held, sequence=sequence)

    async def _place(
        self,
        request: coordinator_pb2.LocateUploadRequest,
        inbox: UpdateInbox,
        identity: Identity,
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Return where the host must put the announced update in the object store.

        The location is None if the host must send the update to the coordinator. Also return True
        if the object may exist already.
        """
        stored = self._coordinator.stored
        if stored is None or not request.HasField("header"):
            return None, False
        header = checked_header(request.header)
        same = ("update_id", "client_id", "blake3", "run_id")
        if any(getattr(request, name) != getattr(header, name) for name in same):
            raise ProtocolError(
                "the header in the request belongs to another update; send the header of the "
                "announced update"
            )
        for each in members_of(header):
            check_client(each.client_id, identity)
        inbox.announced(header)
        inbox.check_size(header, self._coordinator.config.maximum_model_bytes)
        return await stored.place(header, request.sha256)

    async def take(
        self, frames: AsyncIterator[Any], identity: Identity
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """Receive one update: its header, its chunks as views of bytes, and its trailer."""
        frames = aiter(frames)
        header = update_header(await anext(frames, None))
        arrived = time.monotonic()
        client = header.client_id
        for name in (client, *(each.client_id for each in header.members)):
            check_client(name, identity)
        inbox = await self._coordinator.runs.inbox_of(header.run_id, header.update_id)
        if inbox.has(client, header.update_id, header.blake3):
            return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
        inbox.announced(header)
        if header.stored:
            header.offset = inbox.held_bytes(client, header.update_id, header.blake3)
        elif self._coordinator.stored is not None:
            self._coordinator.stored.require_direct(identity.name)
        counted = self._coordinator.metrics.transfer(
            Direction.UP, identity.name, header.blake3, offset=header.offset
        )
        async with self._order.turn(header.update_id, header.blake3, header.sequence):
            # If the update was verified before the host sent it again, its bytes are not needed.
            if inbox.has(client, header.update_id, header.blake3):
                return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
            with counted as transfer, contextlib.ExitStack() as stack:
                model = inbox.model(client, header.update_id)
                upload = _Upload(header, inbox, model, transfer, arrived)
                if upload.is_piece and not header.stored:
                    return await self._receive_piece(upload, frames, stack)
                receive = self._collect if header.stored else self._receive
                try:
                    with inbox.spooling(header):
                        receiver, blake3 = await receive(upload, frames, stack)
                    # The update is complete, so it counts even if the host disconnects now.
                    await shielded(_finish(upload, receiver, blake3))
                except DigestMismatchError:
                    if header.stored and self._coordinator.stored is not None:
                        await self._coordinator.stored.doubt()
                    raise
        return coordinator_pb2.SubmitUpdateResponse()

    async def _receive(
        self, upload: _Upload, frames: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> tuple[FileReceiver, str]:
        """Receive all bytes of a file. Return a receiver, which `stack` closes, and the digest in
        the trailer."""
        header = upload.header
        async with (
            self._order.receiving(header.update_id, header.blake3),
            self._coordinator.transfers.turn(upload.transfer),
        ):
            receiver = self._receiver(upload)
            stack.enter_context(contextlib.closing(receiver))
            async for frame in frames:
                if not isinstance(frame, memoryview):
                    return receiver, update_trailer(frame).blake3
                self._write(upload, receiver, frame)
        raise _cut_off(receiver.received, header.size)

    async def _receive_piece(
        self, upload: _Upload, frames: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """Receive the bytes of a file up to the offset, named in the header, where this stream
        ends."""
        header, transfers = upload.header, self._coordinator.transfers
        with upload.inbox.spooling(header):
            async with (
                self._order.receiving(header.update_id, header.blake3),
                transfers.turn(upload.transfer, header.until - header.offset),
            ):
                waited = time.monotonic() - upload.arrived
                receiver = self._receiver(upload)
                stack.enter_context(contextlib.closing(receiver))
                async for frame in frames:
                    if not isinstance(frame, memoryview):
                        raise ProtocolError(
                            "a stream that ends before its file must not have a trailer"
                        )
                    self._write(upload, receiver, frame)
        if receiver.received != header.until:
            raise _cut_off(receiver.received, header.size)
        upload.transfer.pause(receiver.received)
        return coordinator_pb2.SubmitUpdateResponse(
            received=receiver.received, waited_seconds=waited
        )

    def _receiver(self, upload: _Upload) -> FileReceiver:
        """Return the receiver of a file. Raises TruncatedError if fewer bytes have arrived than
        announced."""
        header, inbox = upload.header, upload.inbox
        held = inbox.held_bytes(header.client_id, header.update_id, header.blake3)
        if held < header.offset <= header.size:
            raise _cut_off(held, header.size)
        return inbox.receiver(header, self._coordinator.config.maximum_model_bytes)

    def _write(self, upload: _Upload, receiver: FileReceiver, chunk: memoryview) -> None:
        receiver.write(chunk)
        upload.transfer.moved += len(chunk)
        upload.inbox.count_up(len(chunk))

    async def _collect(
        self, upload: _Upload, _: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> tuple[FileReceiver, str]:
        """Read a file that its host has put into the object store; return the same values as
        `_receive`.

        `stack` deletes the object when the stack is closed, whether the object is valid or not.
        """
        header, inbox, stored = upload.header, upload.inbox, self._coordinator.stored
        if stored is None:
            raise ObjectStoreError(
                "this coordinator does not use an object store; send the update to the coordinator"
            )

        def moved(size: int) -> None:
            upload.transfer.moved += size
            inbox.count_up(size)

        async with self._coordinator.transfers.turn(upload.transfer):
            held = inbox.held_bytes(header.client_id, header.update_id, header.blake3)
            header.offset = min(header.size, held)
            receiver = inbox.receiver(header, self._coordinator.config.maximum_model_bytes)
            stack.enter_context(contextlib.closing(receiver))
            await stored.collect(header, receiver, moved)
            stack.callback(stored.forget, header)
            return receiver, header.blake3


def _cut_off(received: int, size: int) -> TruncatedError:
    return TruncatedError(
        f"the upload ended without a trailer after {received} of {size} bytes; send the rest",
        received=received,
        size=size,
    )


async def _finish(upload: _Upload, receiver: FileReceiver, blake3: str) -> None:
    """Verify the digest of a complete file, and pass the update to its run."""
    header, inbox, screen = upload.header, upload.inbox, FiniteScreen()
    with inbox.spooling(header):
        path = await asyncio.to_thread(receiver.finish, blake3, see=screen.see)
        update = ReceivedUpdate(header=header, path=path, model=upload.model, finite=screen.clean)
        await inbox.take(update)
    upload.transfer.complete()
