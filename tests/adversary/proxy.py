"""A coordinator that lies: a proxy on the wire between hosts and a real coordinator.

It holds the coordinator's certificate, so hosts take it for the coordinator. Each host's calls are
forwarded to the real coordinator with that host's own certificate. In between, a script receives
every message as protobuf, and may rewrite, drop, duplicate, delay or forge it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from support.pki import server_credentials

from potluck.common.net.identity import identity_from_certificate, parse_certificates
from potluck.common.net.protocol import FRAMING_VERSION
from potluck.common.net.tls import (
    CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    TlsFiles,
    channel_credentials,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import coordinator_pb2_grpc, transfer_pb2


class Script:
    """Changes to forwarded messages; by default each is forwarded unchanged.

    A method returns the messages to forward in place of the given one, which it may modify.
    `host` is the host's id.
    """

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        """Change a message of the coordinator on a host's control stream."""
        return [message]

    def from_host(self, host: str, message: rpc.AttendRequest) -> Iterable[rpc.AttendRequest]:
        """Change a message of a host on its control stream."""
        return [message]

    def model(
        self, host: str, frame: rpc.CoordinatorServiceFetchModelResponse
    ) -> Iterable[rpc.CoordinatorServiceFetchModelResponse]:
        """Change a frame of a file that a host downloads."""
        return [frame]

    def upload(
        self, host: str, frame: rpc.SubmitUpdateRequest
    ) -> Iterable[rpc.SubmitUpdateRequest]:
        """Change a frame of a host's update."""
        return [frame]

    def loses(self, host: str, frames: Sequence[rpc.SubmitUpdateRequest]) -> bool:
        """Return True if the connection breaks after these frames of a host's update."""
        return False


@dataclass
class _Attending:
    """One host's control stream, with the messages that wait to be sent to either side."""

    to_host: asyncio.Queue[rpc.AttendResponse | BaseException | None] = field(
        default_factory=asyncio.Queue
    )
    to_coordinator: asyncio.Queue[rpc.AttendRequest | None] = field(default_factory=asyncio.Queue)
    welcomed: bool = False
    early: list[rpc.AttendResponse] = field(default_factory=list)


class LyingCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves hosts under the coordinator's name. `script` may be changed at any time.

    said: by host, the messages of its control stream, as it sent them. files: models that the test
    has made, by their digest.
    """

    def __init__(self, hosts: Mapping[str, TlsFiles], upstream: int, script: Script) -> None:
        """hosts: certificates by host id. upstream: the port of the real coordinator."""
        self.script = script
        self.port = 0
        self.said: list[tuple[str, rpc.AttendRequest]] = []
        self.files: dict[str, bytes] = {}
        self._hosts = hosts
        self._upstream = upstream
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._attending: dict[str, _Attending] = {}

    def tell(self, host: str, instruction: rpc.Instruction) -> None:
        """Send a host an instruction that the test has made, after the coordinator's welcome."""
        streams = self._attending[host]
        ours = rpc.AttendResponse(instruction=instruction)
        (streams.to_host.put_nowait if streams.welcomed else streams.early.append)(ours)

    def say(self, host: str, answer: rpc.Answer) -> None:
        """Send the coordinator an answer in the name of a host."""
        self._attending[host].to_coordinator.put_nowait(rpc.AttendRequest(answer=answer))

    async def Attend(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[rpc.AttendResponse]:
        """Forward both directions of a control stream."""
        host = _host_of(context)
        streams = self._attending[host] = _Attending()
        upward = asyncio.create_task(self._read_host(host, request_iterator, streams))
        downward = asyncio.create_task(self._read_coordinator(host, streams))
        try:
            while (message := await streams.to_host.get()) is not None:
                if isinstance(message, BaseException):
                    await _refuse(context, message)
                    return
                yield message
        finally:
            for task in (upward, downward):
                task.cancel()
            await asyncio.gather(upward, downward, return_exceptions=True)

    async def _read_host(self, host: str, requests: Any, streams: _Attending) -> None:
        async for message in requests:
            self.said.append((host, message))
            for each in self.script.from_host(host, message):
                streams.to_coordinator.put_nowait(each)
        streams.to_coordinator.put_nowait(None)

    async def _read_coordinator(self, host: str, streams: _Attending) -> None:
        async def requests() -> AsyncIterator[rpc.AttendRequest]:
            while (message := await streams.to_coordinator.get()) is not None:
                yield message

        try:
            async for message in self._stub(host).Attend(requests()):
                for each in (*self.script.to_host(host, message), *streams.early):
                    streams.to_host.put_nowait(each)
                streams.welcomed, streams.early = True, []
        except grpc.aio.AioRpcError as error:
            streams.to_host.put_nowait(error)
        else:
            streams.to_host.put_nowait(None)

    async def FetchModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Forward a download, frame by frame."""
        host = _host_of(context)
        if request.blake3 in self.files:
            for part in _frames(request.blake3, self.files[request.blake3], request.offset):
                yield rpc.CoordinatorServiceFetchModelResponse(frame=part)
            return
        try:
            async for frame in self._stub(host).FetchModel(request):
                for each in self.script.model(host, frame):
                    yield each
        except grpc.aio.AioRpcError as error:
            await _refuse(context, error)

    async def SubmitUpdate(self, request_iterator: Any, context: Any) -> Any:
        """Forward an upload as soon as all of its frames have arrived."""
        host = _host_of(context)
        received = [frame async for frame in request_iterator]
        if self.script.loses(host, received):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was reset")

        async def frames() -> AsyncIterator[rpc.SubmitUpdateRequest]:
            for frame in received:
                for each in self.script.upload(host, frame):
                    yield each

        return await self._unary(context, self._stub(host).SubmitUpdate(frames()))

    async def LocateUpload(self, request: Any, context: Any) -> Any:
        """Forward a host's question how much of its update has arrived."""
        return await self._unary(context, self._stub(_host_of(context)).LocateUpload(request))

    async def _unary(self, context: Any, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            await _refuse(context, error)

    def _stub(self, host: str) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
        if host not in self._channels:
            self._channels[host] = grpc.aio.secure_channel(
                f"127.0.0.1:{self._upstream}",
                channel_credentials(self._hosts[host]),
                options=CHANNEL_OPTIONS,
            )
        return coordinator_pb2_grpc.CoordinatorServiceStub(self._channels[host])

    async def close(self) -> None:
        """End all calls to the real coordinator."""
        for channel in self._channels.values():
            await channel.close()


@contextlib.asynccontextmanager
async def lying_coordinator(
    certificate: TlsFiles, hosts: Mapping[str, TlsFiles], upstream: int, script: Script
) -> AsyncIterator[LyingCoordinator]:
    """Run a proxy on its own port. certificate: the coordinator's."""
    proxy = LyingCoordinator(hosts, upstream, script)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(proxy, server)
    proxy.port = server.add_secure_port("127.0.0.1:0", server_credentials(certificate))
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(1.0)
        await proxy.close()


def _frames(blake3: str, content: bytes, offset: int) -> list[transfer_pb2.ModelFrame]:
    """Return a small file, from an offset on, as frames."""
    header = transfer_pb2.FileHeader(
        version=FRAMING_VERSION, blake3=blake3, size=len(content), offset=offset
    )
    return [
        transfer_pb2.ModelFrame(header=header),
        transfer_pb2.ModelFrame(chunk=content[offset:]),
        transfer_pb2.ModelFrame(trailer=transfer_pb2.FileTrailer(blake3=blake3)),
    ]


def _host_of(context: Any) -> str:
    [pem] = context.auth_context()["x509_pem_cert"]
    return identity_from_certificate(parse_certificates(pem)[0]).name


async def _refuse(context: Any, error: BaseException) -> None:
    """Answer with the error of the real coordinator, including its details."""
    assert isinstance(error, grpc.aio.AioRpcError)
    context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
    await context.abort(error.code(), error.details() or "")
