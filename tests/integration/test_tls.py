"""Allowed and refused TLS connections between roles, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.pki import TestFederation, make_federation, server_credentials, tls_files
from support.promises import in_time

from potluck.common.errors import ConfigurationError, IdentityError, UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.identity import MAXIMUM_URI_BYTES, Role, peer_credential
from potluck.common.net.protocol import MAXIMUM_MESSAGE_BYTES
from potluck.common.net.tls import (
    CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    TlsFiles,
    channel,
    channel_credentials,
)
from potluck.deploy.pki import authority as pki

METHOD = "/test.Echo/Call"
ENDED = asyncio.Event()
MIB = 1 << 20


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    return make_federation(tmp_path_factory.mktemp("stranger"))


async def echo(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    """Return the caller's identity and the request."""
    return peer_credential(context.auth_context()).identity.uri().encode() + b"|" + request


async def attend(
    request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
) -> AsyncIterator[bytes]:
    """Send one message at once, then stay silent; `ENDED` is set when the call ends."""
    try:
        yield request
        await asyncio.Event().wait()
    finally:
        ENDED.set()


@asynccontextmanager
async def listening(credentials: grpc.ServerCredentials, port: int = 0) -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    methods: Any = {
        "Call": grpc.unary_unary_rpc_method_handler(echo),
        "Attend": grpc.unary_stream_rpc_method_handler(attend),
    }
    handlers = grpc.method_handlers_generic_handler("test.Echo", methods)
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def call(address: str, files: TlsFiles, request: bytes = b"", **options: Any) -> bytes:
    async with channel(address, files, **options) as connection:
        return await calling(connection, address, files, request, **options)


async def calling(
    connection: grpc.aio.Channel,
    address: str,
    files: TlsFiles,
    request: bytes = b"",
    **options: str,
) -> bytes:
    try:
        return await echoing(connection)(request, timeout=60)
    except grpc.aio.AioRpcError as error:
        raise connection_error(error, address, files, **options) from error


def echoing(connection: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return connection.unary_unary(METHOD)


async def call_with(port: int, authority: Path, pair: TlsFiles | None, shown: TlsFiles) -> bytes:
    """Call without this project's checks before connecting, as an attacker would."""
    credentials = unchecked_client(authority, pair)
    address = f"localhost:{port}"
    async with grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS) as connection:
        return await calling(connection, address, shown)


def unchecked_client(authority: Path, pair: TlsFiles | None) -> grpc.ChannelCredentials:
    if pair is None:
        return grpc.ssl_channel_credentials(authority.read_bytes())
    return grpc.ssl_channel_credentials(
        authority.read_bytes(), pair.key.read_bytes(), pair.certificate.read_bytes()
    )


def fake_coordinator(federation: TestFederation, usage: x509.ObjectIdentifier) -> TlsFiles:
    """Return a host's identity with the coordinator's names, certified by the real authority."""
    folder = federation.folder
    authority = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
    signer = load_pem_private_key((folder / "authority.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier("potluck://test/host/host-0?clients=client-0"),
        x509.DNSName("localhost"),
        x509.IPAddress(ip_address("127.0.0.1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host-0")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(signer, SHA256())
    )
    files = TlsFiles(
        certificate=folder / f"fake-{usage._name}.pem",
        key=folder / f"fake-{usage._name}.key",
        authority=folder / "authority.pem",
    )
    files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.key.write_bytes(secret)
    return files


def unchecked_server(files: TlsFiles) -> grpc.ServerCredentials:
    pair = (files.key.read_bytes(), files.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], files.authority.read_bytes(), True)


async def test_coordinator_knows_the_identity_of_connected_parties(
    federation: TestFederation,
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        for address in (f"127.0.0.1:{port}", f"localhost:{port}"):
            for files in (federation.operator, federation.hosts["host-0"]):
                answer = await call(address, files, b"hello")
                assert answer == files.load().identity.uri().encode() + b"|hello"


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[bytes]]:
    """Run an HTTP proxy for all hosts that refuses every request; yield the requests."""
    asked = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield asked


async def test_loopback_connections_bypass_the_proxy(
    federation: TestFederation, proxy: list[bytes]
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        for address in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}"):
            await call(address, federation.operator)
    assert proxy == []


async def test_remote_connections_use_the_proxy(
    federation: TestFederation, proxy: list[bytes]
) -> None:
    named = r"invalid:7443 through the HTTP proxy 127\.0\.0\.1:\d+ \(.* variable https_proxy\): "
    with pytest.raises(UnreachableError, match=named + ".* or add coordinator.invalid to no_proxy"):
        await call("coordinator.invalid:7443", federation.operator)
    assert set(proxy) == {b"CONNECT coordinator.invalid:7443 HTTP/1.1\r\n"}


async def test_unreachable_or_resetting_proxy_is_named_in_the_error(
    federation: TestFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.transport.abort()

    for name in ("grpc_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        named = f"through the HTTP proxy 127.0.0.1:{port} (environment variable https_proxy): "
        with pytest.raises(UnreachableError, match=re.escape(named)):
            await call("coordinator.invalid:7443", federation.operator)
    dead = re.escape(f"{named}nothing listens there")
    with pytest.raises(UnreachableError, match=dead):
        await call("coordinator.invalid:7443", federation.operator)


async def test_messages_up_to_the_maximum_size_pass_in_both_directions(
    federation: TestFederation,
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        address, files = f"localhost:{port}", federation.operator
        request = bytes(MAXIMUM_MESSAGE_BYTES - 1000)
        assert len(await call(address, files, request)) > len(request)
        with pytest.raises(UnreachableError, match="RESOURCE_EXHAUSTED"):
            await call(address, files, bytes(MAXIMUM_MESSAGE_BYTES + 1))


async def test_the_largest_certificate_that_is_issued_connects(tmp_path: Path) -> None:
    clients = [f"hospital-{number}x" for number in range(400)]
    federation = make_federation(tmp_path, {"large": clients})
    files = federation.hosts["large"]
    assert MAXIMUM_URI_BYTES * 0.85 < len(files.load().identity.uri()) <= MAXIMUM_URI_BYTES
    async with listening(server_credentials(federation.coordinator)) as port:
        assert b"hospital-399x" in await call(f"localhost:{port}", files)


async def test_a_certificate_of_another_ca_is_refused_by_either_side(
    federation: TestFederation, stranger: TestFederation
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        with pytest.raises(IdentityError, match=r"sent a certificate that .* did not sign"):
            await call(f"localhost:{port}", stranger.operator)
        authority = federation.operator.authority
        with pytest.raises(UnreachableError, match=r"refused .*operator\.pem"):
            await call_with(port, authority, stranger.operator, stranger.operator)


async def test_connection_without_a_certificate_is_refused(federation: TestFederation) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        with pytest.raises(UnreachableError, match="closed the connection at once"):
            await call_with(port, federation.operator.authority, None, federation.operator)
        async with grpc.aio.insecure_channel(f"localhost:{port}") as connection:
            with pytest.raises(UnreachableError):
                await calling(connection, f"localhost:{port}", federation.operator)


async def test_a_host_cannot_pose_as_the_coordinator(federation: TestFederation) -> None:
    host = fake_coordinator(federation, ExtendedKeyUsageOID.CLIENT_AUTH)
    async with listening(unchecked_server(host)) as port:
        with pytest.raises(IdentityError, match="a certificate that is not a coordinator's"):
            await call(f"localhost:{port}", federation.operator)
    # A certificate with the same names and the coordinator's usage connects, so the usage was
    # refused above.
    server = fake_coordinator(federation, ExtendedKeyUsageOID.SERVER_AUTH)
    async with listening(unchecked_server(server)) as port:
        assert await call(f"localhost:{port}", federation.operator)


async def test_certificate_of_a_coordinator_is_refused_as_a_client(
    federation: TestFederation,
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        files = federation.coordinator
        with pytest.raises(UnreachableError, match="closed the connection at once"):
            await call_with(port, files.authority, files, files)


async def test_certificate_of_the_coordinator_must_name_the_dialled_address(tmp_path: Path) -> None:
    federation = make_federation(tmp_path, addresses=["coordinator"])
    async with listening(server_credentials(federation.coordinator)) as port:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(IdentityError, match=rf"does not name {host}; .* --host {host}"):
                await call(f"{host}:{port}", federation.operator)
        address = f"127.0.0.1:{port}"
        assert await call(address, federation.operator, server_name="coordinator")
        with pytest.raises(IdentityError, match="does not name elsewhere"):
            await call(address, federation.operator, server_name="elsewhere")


async def test_an_expired_certificate_is_refused_by_either_side(
    federation: TestFederation,
) -> None:
    past = datetime.now(UTC) - timedelta(days=9)
    folder = federation.folder
    operator = tls_files(pki.issue(folder, Role.OPERATOR, "past", days=7, now=past))
    coordinator = tls_files(
        pki.issue(folder, Role.COORDINATOR, "past-c", hosts=["localhost"], days=7, now=past)
    )
    async with listening(server_credentials(federation.coordinator)) as port:
        with pytest.raises(ConfigurationError, match=r"past\.pem expired on"):
            await call(f"localhost:{port}", operator)
        with pytest.raises(UnreachableError, match=r"refused .*past\.pem"):
            await call_with(port, operator.authority, operator, operator)
    async with listening(unchecked_server(coordinator)) as port:
        with pytest.raises(IdentityError, match=r"the coordinator's certificate .* has expired"):
            await call(f"localhost:{port}", federation.operator)


async def test_key_of_another_certificate_is_refused_before_connecting(
    federation: TestFederation,
) -> None:
    mixed = federation.operator.model_copy(update={"key": federation.coordinator.key})
    with pytest.raises(ConfigurationError, match="is not the key of"):
        channel("localhost:1", mixed)


@pytest.mark.parametrize(
    "address",
    ["localhost", "localhost:", "::1:7443", "http://x:1", "a b:1", "localhost:0", "[::1]:65536"],
)
async def test_an_address_needs_host_and_port(address: str, federation: TestFederation) -> None:
    with pytest.raises(ConfigurationError, match="is not HOST:PORT with a port from 1 to 65535"):
        channel(address, federation.operator)


async def test_closed_port_and_port_in_use_are_errors(federation: TestFederation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match="Failed to bind"):
            async with listening(server_credentials(federation.coordinator), port):
                pytest.fail("a port in use was bound a second time")
    with pytest.raises(UnreachableError, match="nothing listens at 127"):
        await call(f"127.0.0.1:{port}", federation.operator)


async def test_two_coordinators_do_not_share_a_port(federation: TestFederation) -> None:
    files = federation.coordinator
    async with listening(server_credentials(files)) as port:
        with pytest.raises(RuntimeError, match="Failed to bind"):
            async with listening(server_credentials(files), port):
                pytest.fail("a port in use was bound a second time")


async def test_a_channel_reconnects_when_the_coordinator_returns(
    federation: TestFederation,
) -> None:
    files = federation.coordinator
    async with listening(server_credentials(files)) as port:
        connection = channel(f"127.0.0.1:{port}", federation.operator)
        assert await echoing(connection)(b"", timeout=60)
    async with connection, listening(server_credentials(files), port):
        assert await in_time(10, echoing(connection)(b"", timeout=60, wait_for_ready=True))


@pytest.mark.slow  # keepalive takes 13 seconds
async def test_both_sides_detect_a_silent_partition_within_15_seconds(
    federation: TestFederation,
) -> None:
    async with (
        listening(server_credentials(federation.coordinator)) as port,
        partition_before(port) as (address, cut),
        channel(address, federation.operator) as connection,
    ):
        ENDED.clear()
        attend_at: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        attend_at = connection.unary_stream("/test.Echo/Attend")
        attending = attend_at(b"hello")
        assert await attending.read() == b"hello"
        cut.clear()

        async def found() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await attending.read()
            await ENDED.wait()
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE

        await in_time(15, found())


@asynccontextmanager
async def partition_before(port: int) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Relay to `port`; while its event is clear, keep connections open and forward nothing."""
    passing = asyncio.Event()
    passing.set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(MIB):
            await passing.wait()
            writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        relays.append(asyncio.create_task(relay(reader, onward_writer)))
        relays.append(asyncio.create_task(relay(onward_reader, writer)))
        writers.extend((writer, onward_writer))

    relays: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", passing
    finally:
        server.close()
        for task in relays:
            task.cancel()
        for writer in writers:
            writer.transport.abort()
        closing = (writer.wait_closed() for writer in writers)
        await asyncio.gather(*relays, *closing, return_exceptions=True)


def test_synchronous_channels_use_the_same_credentials(
    federation: TestFederation,
) -> None:
    async def serve_one_call() -> bytes:
        async with listening(server_credentials(federation.coordinator)) as port:
            return await asyncio.to_thread(call_synchronously, port)

    def call_synchronously(port: int) -> bytes:
        credentials = channel_credentials(federation.operator)
        address = f"localhost:{port}"
        with grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS) as connection:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = connection.unary_unary(METHOD)
            return method(b"", timeout=60)

    assert asyncio.run(serve_one_call()) == b"potluck://test/operator/operator|"


OLD = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2)


async def test_tls_1_3_is_negotiated_and_older_versions_are_refused(
    federation: TestFederation,
) -> None:
    async with listening(server_credentials(federation.coordinator)) as port:
        assert await handshake(port, federation.operator) == "TLSv1.3"
        for version in OLD:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await handshake(port, federation.operator, version)


async def test_handshake_helper_supports_old_tls_versions(federation: TestFederation) -> None:
    server_side = context_of(ssl.PROTOCOL_TLS_SERVER, federation.coordinator)
    restrict(server_side, OLD[0], OLD[-1])
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server_side
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        agreed = [await handshake(port, federation.operator, version) for version in OLD]
    assert agreed == ["TLSv1", "TLSv1.1", "TLSv1.2"]


async def test_client_refuses_a_coordinator_with_old_tls(federation: TestFederation) -> None:
    server_side = context_of(ssl.PROTOCOL_TLS_SERVER, federation.coordinator)
    server_side.maximum_version = ssl.TLSVersion.TLSv1_2
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server_side
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnreachableError):
            await call(f"localhost:{port}", federation.operator)


async def handshake(
    port: int, files: TlsFiles, version: ssl.TLSVersion | None = None
) -> str | None:
    """Return the TLS version that a server negotiates with Python's own client."""
    context = context_of(ssl.PROTOCOL_TLS_CLIENT, files)
    if version is not None:
        restrict(context, version, version)
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    agreed: str | None = writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    return agreed


def context_of(side: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    return context


def restrict(context: ssl.SSLContext, least: ssl.TLSVersion, most: ssl.TLSVersion) -> None:
    context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise OpenSSL itself refuses old versions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # old versions are the point
        context.minimum_version, context.maximum_version = least, most


@asynccontextmanager
async def web_server(pair: TlsFiles, *protocols: str) -> AsyncIterator[int]:
    """Run an HTTP/1 server over TLS, as a load balancer answers unknown clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if protocols:
        context.set_alpn_protocols(list(protocols))

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


def self_issued(folder: Path) -> TlsFiles:
    """Return a certificate as TLS inspection issues it: with the dialled name and without a
    role."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Example Web Inspection")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, SHA256())
    )
    files = TlsFiles(
        certificate=folder / "web.pem", key=folder / "web.key", authority=folder / "web.pem"
    )
    files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.key.write_bytes(pem)
    return files


async def test_error_for_tls_inspection_names_its_issuer(
    federation: TestFederation, tmp_path: Path
) -> None:
    async with listening(unchecked_server(self_issued(tmp_path))) as port:
        with pytest.raises(IdentityError) as caught:
            await call(f"localhost:{port}", federation.operator)
    assert caught.value.message == (
        f"localhost:{port} shows a certificate that 'CN=Example Web Inspection' issued, which is "
        "not a federation's authority: a TLS inspection or a load balancer on the path ends the "
        f"TLS connection; exempt localhost:{port} from it, or let it pass TLS through"
    )


@pytest.mark.parametrize("protocols", [(), ("h2",)])
async def test_error_for_a_load_balancer_names_tls_termination(
    federation: TestFederation, protocols: tuple[str, ...]
) -> None:
    async with web_server(federation.coordinator, *protocols) as port:
        with pytest.raises(IdentityError, match=r"answers as a web server .*pass TLS through"):
            await call(f"localhost:{port}", federation.operator)


async def test_error_for_a_frozen_coordinator_differs_from_a_refused_connection(
    federation: TestFederation,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        address = f"localhost:{never_accepts.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="accepts connections, but does not answer"):
            await call(address, federation.operator)
