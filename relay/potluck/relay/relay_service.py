"""The service that hosts call at a relay: the same calls as at the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import structlog

from potluck.common.errors import (
    IdentityError,
    PotluckError,
    ProtocolError,
    StorageError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.identity import Identity
from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES
from potluck.common.net.transfer import check_digest
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relay_state import relay_disk
from potluck.relay.relayed_files import RelayedFiles
from potluck.relay.relayed_updates import RelayedUpdates
from potluck.relay.upstream import Upstream, for_hosts
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc
from potluck.server.service.guard import Context, check_client, identity_of
from potluck.server.service.transfers import send_file

log = structlog.get_logger()


class RelayService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The service of a relay for its hosts. The guard turns exceptions into statuses."""

    def __init__(
        self,
        upstream: Upstream,
        files: RelayedFiles,
        updates: RelayedUpdates,
        metrics: RelayMetrics,
    ) -> None:
        self._upstream = upstream
        self._files = files
        self._updates = updates
        self._metrics = metrics

    # Control ----------------------------------------------------------------------------------

    async def Attend(
        self, request_iterator: AsyncIterator[rpc.AttendRequest], context: Context
    ) -> AsyncIterator[rpc.AttendResponse]:
        """Forward a host's control stream: all messages unchanged, except the hello and the
        welcome.
        """
        identity = identity_of(context)
        first = self._greeting(await anext(aiter(request_iterator), None), identity)
        clients = len(first.hello.client_ids)
        call = self._upstream.attend()
        sending = asyncio.create_task(self._send(call, identity.name, first, request_iterator))
        welcomed = False
        try:
            while (response := await self._upstream.next_word(call)) is not None:
                if not welcomed:
                    welcomed = True
                    self._metrics.attending(1, clients)
                    log.info("host attends", host=identity.name, clients=clients)
                if response.HasField("welcome"):
                    response.welcome.object_store = False  # files of this host go through the relay
                if response.HasField("instruction"):
                    self._updates.expected.see(response.instruction, identity.name)
                yield response
        except PotluckError:
            if sending.done() and not sending.cancelled():
                sending.result()  # raises the host's error if the host ended the stream
            raise
        finally:
            sending.cancel()
            self._upstream.left(call)
            await asyncio.gather(sending, return_exceptions=True)
            if welcomed:
                self._updates.expected.left(identity.name)
                self._metrics.attending(-1, -clients)
                log.info("host left", host=identity.name, clients=clients)

    def _greeting(self, first: rpc.AttendRequest | None, identity: Identity) -> rpc.AttendRequest:
        """Return a host's hello for the coordinator: the relay adds the host's name.

        Raises ProtocolError, IdentityError.
        """
        if first is None or first.WhichOneof("message") != "hello":
            raise ProtocolError("the first message on the control stream must be a hello")
        relay = self._upstream.identity
        for client in first.hello.client_ids:
            check_client(client, identity)
            if not relay.may_speak_for(client):
                raise IdentityError(
                    f"relay '{relay.name}' may not speak for client '{client}'; issue the relay a "
                    "certificate with this client: `potluck pki issue … --clients`",
                    relay=relay.name,
                    client=client,
                )
        first.hello.behind = identity.name
        return first

    async def _send(
        self,
        call: Any,
        host: str,
        first: rpc.AttendRequest,
        requests: AsyncIterator[rpc.AttendRequest],
    ) -> None:
        """Forward a host's messages until its stream ends."""
        try:
            await call.write(first)
            async for request in requests:
                if request.HasField("answer"):
                    self._updates.expected.answered(request.answer.instruction_id, host)
                await call.write(request)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # writing fails on a broken stream, but only reading raises its status
        except PotluckError:
            call.cancel()
            raise

    # Models down ------------------------------------------------------------------------------

    async def FetchModel(
        self, request: rpc.CoordinatorServiceFetchModelRequest, context: Context
    ) -> AsyncIterator[Any]:
        """Send a file by its digest: messages, and chunks already encoded (see `guard.py`)."""
        blake3 = check_digest(request.blake3)
        wanted = request.chunk_bytes or CHUNK_BYTES
        chunk_bytes = min(max(wanted, LEAST_CHUNK_BYTES), CHUNK_BYTES)
        reply = rpc.CoordinatorServiceFetchModelResponse
        async with contextlib.AsyncExitStack() as stack:
            try:
                path = await stack.enter_async_context(self._files.lent(blake3))
            except StorageError as error:
                # A host would treat the StorageError as a failure of its own disk, and give up.
                text = f"the coordinator can't send a file to the relay: {error.message}"
                raise UnreachableError(text) from error
            except (IdentityError, ProtocolError) as error:
                raise for_hosts(error) from error
            messages = send_file(
                path, blake3, request.offset, reply, chunk_bytes=chunk_bytes, limit=request.limit
            )
            with relay_disk(path):
                for message in messages:
                    if isinstance(message, bytes):
                        self._metrics.moved_behind(Direction.DOWN, len(message))
                    yield message

    # Updates up -------------------------------------------------------------------------------

    async def LocateUpload(
        self, request: rpc.LocateUploadRequest, context: Context
    ) -> rpc.LocateUploadResponse:
        """Return the number of bytes of an update that have arrived."""
        return await self._updates.locate(request, identity_of(context))

    async def SubmitUpdate(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> rpc.SubmitUpdateResponse:
        """Receive an update: one header, chunks as memory views (see `guard.py`), one trailer."""
        return await self._updates.take(request_iterator, identity_of(context))
