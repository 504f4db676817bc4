"""The service for hosts: control stream, downloads of models, uploads of updates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from potluck.common.errors import IdentityError, ProtocolError
from potluck.common.monitoring.metric_labels import Direction, TransferOutcome
from potluck.common.names import check_tags, is_name
from potluck.common.net.frames import chunk_of
from potluck.common.net.identity import Identity, Role
from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES, VERSIONS, check_agreement
from potluck.common.net.transfer import check_digest
from potluck.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc, transfer_pb2
from potluck.server.clock import utc
from potluck.server.hosts.attendance import LARGEST_EPOCH, LONGEST_TASK_NAME, HostSession
from potluck.server.service.coordinator import Coordinator
from potluck.server.service.guard import Context, check_client, credential_of, identity_of
from potluck.server.service.transfers import ConfirmedBytes, send_file
from potluck.server.service.uploads import Uploads

_LONGEST_DEVICE = 160
"""Number of characters after which the text about a host's devices is cut off; enough for eight
GPUs."""


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The service for hosts. `guard.py` turns exceptions into statuses."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._uploads = Uploads(coordinator)
        self._confirmed = ConfirmedBytes()

    # Control ----------------------------------------------------------------------------------

    async def Attend(
        self, request_iterator: AsyncIterator[coordinator_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[coordinator_pb2.AttendResponse]:
        """Serve the control stream of a host."""
        first = await anext(aiter(request_iterator), None)
        session = self._greet(first, identity_of(context))
        session.certificate_expires = credential_of(context).expires
        session.address = unquote(context.peer()).partition(":")[2]
        session.since = session.last_heard = utc()
        async with self._coordinator.hosts.attending(session):
            reader = asyncio.create_task(self._listen(session, request_iterator))
            try:
                yield self._welcome()
                while (message := await session.outbox.get()) is not None:
                    yield message
                with contextlib.suppress(asyncio.CancelledError):
                    if reader.done():
                        reader.result()
            finally:
                reader.cancel()

    def _welcome(self) -> coordinator_pb2.AttendResponse:
        """Return the answer to a host's hello."""
        welcome = coordinator_pb2.Welcome(
            coordinator_id=self._coordinator.id,
            versions=VERSIONS,
            object_store=self._coordinator.stored is not None,
        )
        seconds = self._coordinator.config.heartbeat_seconds
        welcome.heartbeat_interval.FromNanoseconds(int(seconds * 1e9))
        return coordinator_pb2.AttendResponse(welcome=welcome)

    def _greet(
        self, first: coordinator_pb2.AttendRequest | None, identity: Identity
    ) -> HostSession:
        if first is None or first.WhichOneof("message") != "hello":
            raise ProtocolError(
                "the first message on the control stream is not a hello; send a hello first"
            )
        hello = first.hello
        host_id = host_of(hello, identity)
        told = {"protocol": hello.protocol_version, **hello.versions}
        check_agreement(told, VERSIONS, host_name=host_id)
        clients = tuple(hello.client_ids)
        if not clients:
            raise ProtocolError(
                f"the hello of host '{host_id}' does not list any client; list at least one client"
            )
        if len(set(clients)) != len(clients):
            raise ProtocolError(
                f"the hello of host '{host_id}' lists a client twice; list each client once"
            )
        for client in clients:
            check_client(client, identity)
        return HostSession(
            host_id=host_id,
            relay=identity.name if identity.role is Role.RELAY else "",
            client_ids=clients,
            device=hello.device[:_LONGEST_DEVICE],
            software_version=hello.software_version[:32],
            tasks=frozenset(name[:LONGEST_TASK_NAME] for name in hello.tasks[:1000]),
            data_epoch=min(hello.data_epoch, LARGEST_EPOCH),
            process_id=hello.process_id[:64],
            membership_epoch=hello.membership_epoch,
            tags=check_tags(hello.tags, host_name=host_id),
        )

    async def _listen(
        self, session: HostSession, requests: AsyncIterator[coordinator_pb2.AttendRequest]
    ) -> None:
        attendance = self._coordinator.attendance
        try:
            async for request in requests:
                session.hear(utc())
                match request.WhichOneof("message"):
                    case "heartbeat":
                        for progress in request.heartbeat.progress:
                            attendance.report(session, progress)
                    case "acknowledgement":
                        attendance.acknowledge(session, request.acknowledgement.instruction_id)
                    case "answer":
                        attendance.answer(session, request.answer)
                    case other:
                        raise ProtocolError(
                            f"the host sent an unexpected '{other}' message on the control "
                            "stream; install the same release on the host and the coordinator"
                        )
        finally:
            session.outbox.put_nowait(None)  # end the stream, because the host has closed its half

    # Models down ------------------------------------------------------------------------------

    async def FetchModel(
        self, request: coordinator_pb2.CoordinatorServiceFetchModelRequest, context: Context
    ) -> AsyncIterator[Any]:
        """Send the model file with the requested digest, as messages and already encoded chunks
        (see `guard.py`)."""
        blake3 = check_digest(request.blake3)
        peer = identity_of(context).name
        coordinator = self._coordinator
        reply = coordinator_pb2.CoordinatorServiceFetchModelResponse
        place = await self._elsewhere(request, peer)
        if place is not None:
            yield reply(frame=transfer_pb2.ModelFrame(elsewhere=place))
            return
        counted = coordinator.metrics.transfer(Direction.DOWN, peer, blake3, offset=request.offset)
        download, confirmed = self._confirmed.asked(peer, blake3, request.offset)
        coordinator.runs.count_down(blake3, confirmed)
        with coordinator.files.lent(blake3) as path, counted as transfer:
            async with coordinator.transfers.turn(transfer, request.limit):
                messages = send_file(
                    path,
                    blake3,
                    request.offset,
                    reply,
                    chunk_bytes=_chunk_bytes(request),
                    limit=request.limit,
                )
                for message in messages:
                    if isinstance(message, bytes):
                        size = len(chunk_of(message) or b"")
                        transfer.moved += size
                        download.hand(size)
                    elif isinstance(message, reply) and message.frame.HasField("trailer"):
                        confirmed = download.complete(request.offset + transfer.moved)
                        coordinator.runs.count_down(blake3, confirmed)
                        # the host has the whole file, so it may end the call now
                        transfer.complete()
                    yield message
            if transfer.outcome is TransferOutcome.BROKEN:  # no error: the requested part was sent
                transfer.pause(request.offset + request.limit)

    async def _elsewhere(
        self, request: coordinator_pb2.CoordinatorServiceFetchModelRequest, peer: str
    ) -> transfer_pb2.StoredFile | None:
        """Return the file's location in the object store; None if the coordinator sends the file
        itself."""
        stored = self._coordinator.stored
        if stored is None:
            return None
        if not request.from_store:
            stored.require_direct(peer)
            return None
        return await stored.model(request.blake3, distrust=request.distrust)

    # Updates up -------------------------------------------------------------------------------

    async def LocateUpload(
        self, request: coordinator_pb2.LocateUploadRequest, context: Context
    ) -> coordinator_pb2.LocateUploadResponse:
        """Return how many bytes of an update have arrived."""
        return await self._uploads.locate(request, identity_of(context))

    async def SubmitUpdate(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> coordinator_pb2.SubmitUpdateResponse:
        """Receive an update: a header, chunks as views of bytes (see `guard.py`), and a trailer."""
        return await self._uploads.take(request_iterator, identity_of(context))


def host_of(hello: coordinator_pb2.Hello, identity: Identity) -> str:
    """Return the name of the host that connects, directly or through a relay. Raises
    IdentityError."""
    if identity.role is not Role.RELAY:
        if hello.behind:
            raise IdentityError(
                f"host '{identity.name}' sent a hello for host '{hello.behind[:80]}', which only a "
                "relay may do; issue a relay certificate with `potluck pki issue FOLDER relay`",
                host=identity.name,
            )
        return identity.name
    if not is_name(hello.behind):
        raise IdentityError(
            f"relay '{identity.name}' sent a hello for {hello.behind[:80]!r}, which is not a "
            "valid host name; hosts connect with `potluck-client`, relays with `potluck-relay`",
            relay=identity.name,
        )
    return hello.behind


def _chunk_bytes(request: coordinator_pb2.CoordinatorServiceFetchModelRequest) -> int:
    """Return the requested chunk size, limited to sensible values."""
    return min(max(request.chunk_bytes or CHUNK_BYTES, LEAST_CHUNK_BYTES), CHUNK_BYTES)
