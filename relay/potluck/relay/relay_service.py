"""A relay as a server: it listens on a port, and offers hosts the same calls as a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio
import structlog

from potluck.client.transfer.file_download import FileDownloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.common.errors import (
    IdentityError,
    PotluckError,
    ProtocolError,
    StorageError,
    UnreachableError,
)
from potluck.common.monitoring.metric_labels import Direction, RelaySource
from potluck.common.monitoring.metrics_server import monitoring
from potluck.common.net.identity import Identity, Role
from potluck.common.net.listening import bind
from potluck.common.net.protocol import CHUNK_BYTES, LEAST_CHUNK_BYTES
from potluck.common.net.tls import SERVER_OPTIONS
from potluck.common.net.transfer import check_digest
from potluck.common.process.memory import spare_what_is_loaded
from potluck.relay.config import RelayConfig
from potluck.relay.held_updates import HeldUpdates
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relay_state import RelayState, relay_disk
from potluck.relay.relayed_updates import RelayedUpdates
from potluck.relay.upstream import Upstream, for_hosts
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc
from potluck.server.hosts.limits import Limits
from potluck.server.hosts.line_limit import limit_of_hosts
from potluck.server.service.certificate import ServerCertificate
from potluck.server.service.guard import HOSTS, Context, Guard, check_client, identity_of
from potluck.server.service.revocations import Revoking
from potluck.server.service.transfers import send_file

# The service --------------------------------------------------------------------------------------

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
        self._lines = limit_of_hosts()

    # Control ----------------------------------------------------------------------------------

    async def Attend(
        self, request_iterator: AsyncIterator[rpc.AttendRequest], context: Context
    ) -> AsyncIterator[rpc.AttendResponse]:
        """Forward a host's control stream. All messages stay unchanged, except the hello and the
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
                    if self._lines.allows(("host connected", identity.name)):
                        log.info("host connected", host=identity.name, clients=clients)
                if response.HasField("welcome"):
                    # the host must transfer files through the relay
                    response.welcome.object_store = False
                if response.HasField("instruction"):
                    self._updates.expected.see(response.instruction, identity.name)
                yield response
        except PotluckError:
            if sending.done() and not sending.cancelled():
                sending.result()  # if the host ended the stream: raises the host's error
            raise
        finally:
            sending.cancel()
            self._upstream.left(call)
            await asyncio.gather(sending, return_exceptions=True)
            if welcomed:
                self._updates.expected.left(identity.name)
                self._metrics.attending(-1, -clients)
                if self._lines.allows(("host disconnected", identity.name)):
                    log.info("host disconnected", host=identity.name, clients=clients)

    def _greeting(self, first: rpc.AttendRequest | None, identity: Identity) -> rpc.AttendRequest:
        """Return a host's hello as the coordinator receives it: with the host's name added.

        Raises ProtocolError, IdentityError.
        """
        if first is None or first.WhichOneof("message") != "hello":
            raise ProtocolError("the first message on the control stream of a host must be a hello")
        relay = self._upstream.identity
        for client in first.hello.client_ids:
            check_client(client, identity)
            if not relay.may_speak_for(client):
                raise IdentityError(
                    f"the certificate of relay '{relay.name}' does not include client '{client}'; "
                    "issue the relay a certificate with this client: `potluck pki issue … "
                    "--clients`",
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
            pass  # the stream is broken; its status is raised by reading, not by writing
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
                # Not StorageError: a host would treat it as a failure of its own disk, and give up.
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


# Files ------------------------------------------------------------------------------------------


class RelayedFiles:
    """Files for hosts, by digest: fetched once from the coordinator, and sent to every host that
    requests them. Runs on the event loop; blocking work runs in threads."""

    def __init__(
        self,
        link: Link,
        cache: ModelCache,
        folder: Path,
        *,
        maximum_bytes: int,
        metrics: RelayMetrics,
    ) -> None:
        """`folder`: for files that are still arriving. Received parts survive a restart."""
        self._cache = cache
        self._files = FileDownloads(link, folder, maximum_bytes=maximum_bytes, spare=cache.spare)
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def lent(self, blake3: str) -> AsyncIterator[Path]:
        """Yield the path of a file; the file is not deleted while the block runs.

        Requests for the same file share one download, which is retried while the coordinator can't
        be reached. Raises NotFoundError if the coordinator has no such file, DigestMismatchError,
        TooLargeError, ProtocolError, StorageError for the coordinator's disk, or RelayStorageError
        for this machine's disk.
        """
        check_digest(blake3)
        with self._cache.pinned(blake3):
            path = self._cache.path(blake3)
            lock = self._locks.setdefault(blake3, asyncio.Lock())
            with relay_disk(path):
                async with lock:
                    here = await self._cache.intact(blake3)
                    if not here:
                        await self._fetch(blake3)
            self._metrics.lent(RelaySource.CACHE if here else RelaySource.COORDINATOR)
            self._cache.touch(blake3)
            yield path

    async def _fetch(self, blake3: str) -> None:
        """Fetch a file into the cache; retry until it is complete or an error is final."""
        self._cache.make_room()
        fetched = await self._files.fetch(blake3)
        fetched.replace(self._cache.path(blake3))
        self._cache.add(blake3)


# Serving ------------------------------------------------------------------------------------------

STOP_SECONDS = 2.0
"""Seconds that the relay waits for active calls when it stops."""


@contextlib.asynccontextmanager
async def serving(config: RelayConfig, state: RelayState) -> AsyncIterator[str]:
    """Serve hosts while the block runs. Yield the address that they can dial.

    Raises ConfigurationError or IdentityError for certificates that can't be used, UnreachableError
    if it can't listen at the address.
    """
    certificate = ServerCertificate(config.tls, Role.RELAY)
    if config.metrics_tls is not None:
        config.metrics_tls.check(config.tls)
    metrics = RelayMetrics()
    upstream = Upstream(config, generator=random.Random(), metrics=metrics)
    held = HeldUpdates(state.updates, now=time.time())
    updates = RelayedUpdates(
        upstream,
        held,
        maximum_bytes=config.maximum_model_bytes,
        wait_seconds=config.sum_wait_seconds,
        clock=time.time,
        metrics=metrics,
    )
    files = RelayedFiles(
        upstream.link,
        ModelCache(state.files, keep=config.cached_files),
        state.fetched,
        maximum_bytes=config.maximum_model_bytes,
        metrics=metrics,
    )
    metrics.watch(state=state.path, tls=config.tls, held=lambda: len(held))
    revoking = Revoking(state.path, config.tls.authority, config.revoked)
    guard = Guard(
        _limits(config),
        revoking.check,
        metrics.refused,
        roles={HOSTS: frozenset({Role.HOST})},
        program="relay",
    )
    revoking.listen(guard.cut_off)
    server = grpc.aio.server(interceptors=[guard], options=SERVER_OPTIONS)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        RelayService(upstream, files, updates, metrics), server
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(upstream.close)
        stack.push_async_callback(updates.close)
        address = bind(server, config.listen, certificate.credentials())
        served = await stack.enter_async_context(
            monitoring(
                config.metrics_address, metrics.instruments, metrics.ready, config.metrics_tls
            )
        )
        await server.start()
        stack.push_async_callback(server.stop, STOP_SECONDS)
        spare_what_is_loaded()
        if served:
            log.info("serving metrics", address=served)
        for work in (upstream.watch(), revoking.watch(), guard.watch_expiry()):
            stack.callback(asyncio.create_task(work).cancel)
        updates.go_on()
        yield address


def _limits(config: RelayConfig) -> Limits:
    return Limits(
        transfers_per_peer=config.transfers_per_peer,
        stall_seconds=config.stall_seconds,
        least_bytes_per_second=config.least_bytes_per_second,
    )
