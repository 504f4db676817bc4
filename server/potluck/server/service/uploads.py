"""Updates on their way in: announced, received, verified, handed to their run's inbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from potluck.common.errors import ObjectStoreError, ProtocolError, TruncatedError
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.identity import Identity
from potluck.common.net.shielded import shielded
from potluck.common.net.transfer import FileReceiver, check_digest
from potluck.common.net.update_frames import checked_header, update_header, update_trailer
from potluck.common.tensors.finite_screen import FiniteScreen
from potluck.rpc.v1 import coordinator_pb2, transfer_pb2
from potluck.server.runs.update_inbox import UpdateInbox, members_of
from potluck.server.runs.update_path import ReceivedUpdate
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.coordinator_metrics import Transfer
from potluck.server.service.guard import check_client
from potluck.server.store.model_files import ModelVersion


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
        """Say how much of an update has arrived."""
        check_client(request.client_id, identity)
        inbox = await self._coordinator.runs.inbox_of(request.run_id, request.update_id)
        if inbox.has(request.client_id, request.update_id, request.blake3):
            return coordinator_pb2.LocateUploadResponse(complete=True)
        inbox.require(request.client_id, request.update_id)
        check_digest(request.blake3)
        held = inbox.held_bytes(request.client_id, request.update_id, request.blake3)
        place, there = await self._place(request, inbox, identity)
        return coordinator_pb2.LocateUploadResponse(offset=held, place=place, stored=there)

    async def _place(
        self,
        request: coordinator_pb2.LocateUploadRequest,
        inbox: UpdateInbox,
        identity: Identity,
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Where in the object store the announced update may be put, and whether it may be there.

        None where it is to be sent here.
        """
        stored = self._coordinator.stored
        if stored is None or not request.HasField("header"):
            return None, False
        header = checked_header(request.header)
        same = ("update_id", "client_id", "blake3", "run_id")
        if any(getattr(request, name) != getattr(header, name) for name in same):
            raise ProtocolError("an upload is located with the header of another update")
        for each in members_of(header):
            check_client(each.client_id, identity)
        inbox.announced(header)
        inbox.check_size(header, self._coordinator.config.maximum_model_bytes)
        return await stored.place(header, request.sha256)

    async def take(
        self, frames: AsyncIterator[Any], identity: Identity
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """Take one update: its header, its chunks as views of their bytes, its trailer."""
        frames = aiter(frames)
        header = update_header(await anext(frames, None))
        client = header.client_id
        for each in members_of(header):
            check_client(each.client_id, identity)
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
        async with self._locks.setdefault(header.update_id, asyncio.Lock()):
            # It may have been verified when it came again.
            if inbox.has(client, header.update_id, header.blake3):
                return coordinator_pb2.SubmitUpdateResponse(duplicate=True)
            with counted as transfer, contextlib.ExitStack() as stack:
                model = inbox.model(client, header.update_id)
                upload = _Upload(header, inbox, model, transfer)
                receive = self._collect if header.stored else self._receive
                with inbox.spooling(header):
                    receiver, blake3 = await receive(upload, frames, stack)
                # All of it is here: it counts even if its host goes away now.
                await shielded(_finish(upload, receiver, blake3))
        return coordinator_pb2.SubmitUpdateResponse()

    async def _receive(
        self, upload: _Upload, frames: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> tuple[FileReceiver, str]:
        """All bytes of a file, in a receiver that `stack` closes, and the digest in its trailer."""
        header, inbox = upload.header, upload.inbox
        async with self._coordinator.transfers.turn(upload.transfer):
            receiver = inbox.receiver(header, self._coordinator.config.maximum_model_bytes)
            stack.enter_context(contextlib.closing(receiver))
            async for frame in frames:
                if not isinstance(frame, memoryview):
                    return receiver, update_trailer(frame).blake3
                receiver.write(frame)
                upload.transfer.moved += len(frame)
                inbox.count_up(len(frame))
        raise TruncatedError(
            f"the upload ended without a trailer after {receiver.received} of {header.size} bytes; "
            "send the rest",
            received=receiver.received,
            size=header.size,
        )

    async def _collect(
        self, upload: _Upload, _: AsyncIterator[Any], stack: contextlib.ExitStack
    ) -> tuple[FileReceiver, str]:
        """The same for a file that its host has put into the object store.

        When `stack` ends, the object is deleted: verified, or good for nothing.
        """
        header, inbox, stored = upload.header, upload.inbox, self._coordinator.stored
        if stored is None:
            raise ObjectStoreError("this coordinator uses no object store (any more)")

        def moved(size: int) -> None:
            upload.transfer.moved += size
            inbox.count_up(size)

        async with self._coordinator.transfers.turn(upload.transfer):
            held = inbox.held_bytes(header.client_id, header.update_id, header.blake3)
            header.offset = min(header.size, held)
            receiver = inbox.receiver(header, self._coordinator.config.maximum_model_bytes)
            stack.enter_context(contextlib.closing(receiver))
            await stored.updates.collect(header, receiver, moved)
            stack.callback(stored.updates.forget, header)
            return receiver, header.blake3


async def _finish(upload: _Upload, receiver: FileReceiver, blake3: str) -> None:
    """Verify the digest of a file that is whole, and hand it to its run."""
    header, inbox, screen = upload.header, upload.inbox, FiniteScreen()
    with inbox.spooling(header):
        path = await asyncio.to_thread(receiver.finish, blake3, see=screen.see)
        update = ReceivedUpdate(header=header, path=path, model=upload.model, finite=screen.clean)
        await inbox.take(update)
    upload.transfer.complete()
