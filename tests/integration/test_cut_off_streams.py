"""Streams that the guard ends because the peer's certificate was revoked: real gRPC with TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from support.pki import make_federation, server_credentials
from support.promises import in_time

from potluck.common.errors import IdentityError
from potluck.common.net.identity import Credential, Role
from potluck.common.net.tls import SERVER_OPTIONS, TlsFiles, channel
from potluck.server.hosts.limits import Limits
from potluck.server.service import guard as guard_module
from potluck.server.service.guard import Guard

LARGE = b"x" * (1 << 20)
"""Content of a response, so large that gRPC can't send a second one before its peer reads the
first."""


class Service:
    """A server with the guard and two streaming methods, and the certificates of two hosts."""

    def __init__(self, folder: Path) -> None:
        self._federation = make_federation(folder, {"host-0": ["a"], "host-1": ["b"]})
        self._revoked: set[int] = set()
        self._serials: dict[str, int] = {}
        self.passed = asyncio.Queue[int]()  # numbers of responses, when they are passed to gRPC
        self.ended = asyncio.Event()  # a handler has ended
        self.port = 0
        self._guard = Guard(
            Limits(),
            self._check,
            lambda reason, peer: None,
            roles={"test.Open": frozenset({Role.HOST})},
        )

    def _check(self, credential: Credential) -> None:
        self._serials[credential.identity.name] = credential.serial
        if credential.serial in self._revoked:
            raise IdentityError("the certificate was revoked", host=credential.identity.name)

    async def send_much(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Send large responses without end."""
        try:
            number = 0
            while True:
                await self.passed.put(number := number + 1)
                yield LARGE
        finally:
            self.ended.set()

    async def stay_silent(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Send one response, then nothing."""
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def start(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[self._guard])
        methods: Any = {
            "Much": grpc.unary_stream_rpc_method_handler(self.send_much, bytes, bytes),
            "Silent": grpc.unary_stream_rpc_method_handler(self.stay_silent, bytes, bytes),
        }
        handlers = grpc.method_handlers_generic_handler("test.Open", methods)
        server.add_generic_rpc_handlers((handlers,))
        credentials = server_credentials(self._federation.coordinator)
        self.port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        return server

    def connect(self, host: str) -> grpc.aio.Channel:
        files: TlsFiles = self._federation.hosts[host]
        return channel(f"localhost:{self.port}", files)

    async def blocked(self) -> None:
        """Wait until gRPC can't send further responses before the peer reads."""
        await self.passed.get()
        while True:
            try:
                await asyncio.wait_for(self.passed.get(), 0.5)
            except TimeoutError:
                return

    def revoke(self, host: str) -> None:
        """Revoke a host's certificate and end its calls."""
        self._revoked.add(self._serials[host])
        self._guard.cut_off(frozenset(self._revoked))


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path / "pki")
    server = await service.start()
    yield service
    await server.stop(None)


def open_stream(connection: grpc.aio.Channel, method: str) -> Any:
    """Call a method of the service."""
    stream: Any = connection.unary_stream(f"/test.Open/{method}")
    return stream(b"")


async def status_of(call: Any) -> grpc.StatusCode:
    """Read a stream to its end; return its status."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_peer_revoked_while_a_response_is_sent_receives_the_reason(service: Service) -> None:
    async with service.connect("host-0") as connection:
        call = open_stream(connection, "Much")
        await call.read()
        await service.blocked()
        service.revoke("host-0")
        assert await in_time(10, status_of(call)) is grpc.StatusCode.PERMISSION_DENIED
        await in_time(10, service.ended.wait())


async def test_peer_revoked_during_a_silent_stream_receives_the_reason(service: Service) -> None:
    async with service.connect("host-0") as connection:
        call = open_stream(connection, "Silent")
        assert await call.read() == b"first"
        service.revoke("host-0")
        assert await in_time(10, status_of(call)) is grpc.StatusCode.PERMISSION_DENIED
        await in_time(10, service.ended.wait())


async def test_stream_of_a_revoked_peer_that_reads_nothing_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "SEND_SECONDS", 0.2)
    async with service.connect("host-0") as connection:
        open_stream(connection, "Much")
        await service.blocked()
        service.revoke("host-0")
        await in_time(10, service.ended.wait())


@pytest.mark.parametrize("method", ["Much", "Silent"])
async def test_revocation_of_a_peer_that_has_left_harms_no_other_peer(
    service: Service, method: str
) -> None:
    async with service.connect("host-1") as other:
        connection = service.connect("host-0")
        await open_stream(connection, method).read()
        if method == "Much":
            await service.blocked()
        closing = asyncio.ensure_future(connection.close())
        service.revoke("host-0")
        await closing
        await in_time(10, service.ended.wait())
        assert await open_stream(other, "Silent").read() == b"first"
