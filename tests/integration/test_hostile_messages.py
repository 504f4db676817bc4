"""Bytes that are not a message, and calls with expired certificates or old TLS versions.

The coordinator refuses each with the right status, counts it and logs only a few lines.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.request
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode as Status
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, until
from support.pki import tls_files
from support.raw_host import RawHost, Refusal, hello, refusal_of

from potluck.common.net.identity import Role
from potluck.common.net.tls import channel
from potluck.deploy.pki import authority as pki
from potluck.rpc.v1 import coordinator_pb2, operator_pb2
from potluck.server.hosts.line_limit import INTERVAL_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ME = "client-2"
VIOLATED = (Status.INVALID_ARGUMENT, "PROTOCOL_VIOLATED")
NO_MESSAGE = b"\xff" * 100


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    """Run two honest hosts; the tests use the certificate of a third one."""
    async with crash_federation(
        tmp_path_factory.mktemp("hostile"),
        clients=3,
        hosts=3,
        count=3,
        rounds=1,
        coordinator={"metrics_address": "127.0.0.1:0"},
        start_hosts=False,
    ) as federation:
        for number in (0, 1):
            await federation.processes.start_host(number)
        await federation.until_attending(2)
        yield federation


def log_of(federation: Federation) -> Path:
    return federation.files.log("coordinator")


def violations(federation: Federation) -> float:
    """Return the number of calls refused for violating the protocol."""
    lines = map(json.loads, log_of(federation).read_text().splitlines())
    address = next(one["address"] for one in lines if one["event"] == "serving metrics")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
        text = answer.read().decode()
    mark = 'potluck_calls_refused_total{reason="PROTOCOL_VIOLATED"} '
    return sum(float(line.removeprefix(mark)) for line in text.splitlines() if mark in line)


METHODS = [
    method
    for file, service in (
        (coordinator_pb2.DESCRIPTOR, "CoordinatorService"),
        (operator_pb2.DESCRIPTOR, "OperatorService"),
    )
    for method in file.services_by_name[service].methods
]


async def refusal(connection: grpc.aio.Channel, method: MethodDescriptor, *says: bytes) -> Refusal:
    """Return the refusal with which a method answers these bytes."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def stream() -> AsyncIterator[bytes]:
        for text in says:
            yield text

    streams = (method.client_streaming, method.server_streaming)
    kinds: Any = {
        (False, False): connection.unary_unary,
        (False, True): connection.unary_stream,
        (True, False): connection.stream_unary,
        (True, True): connection.stream_stream,
    }
    call = kinds[streams](path)(stream() if method.client_streaming else says[0])
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            if method.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
async def test_invalid_protobuf_bytes_are_refused_as_a_protocol_violation(
    federation: Federation, method: MethodDescriptor
) -> None:
    operator = federation.files.operator
    before = await asyncio.to_thread(violations, federation)
    async with RawHost.of(federation.files.hosts[2]) as host:
        if method.containing_service.name == "CoordinatorService":
            assert await refusal(host.channel, method, NO_MESSAGE) == VIOLATED
        else:
            async with channel(operator.coordinator, operator.tls) as connection:
                assert await refusal(connection, method, NO_MESSAGE) == VIOLATED
    assert await asyncio.to_thread(violations, federation) == before + 1
    assert "Traceback" not in log_of(federation).read_text()


async def test_invalid_bytes_after_a_valid_message_are_refused(federation: Federation) -> None:
    attend = METHODS[0]
    assert attend.name == "Attend"
    async with RawHost.of(federation.files.hosts[2]) as host:
        first = hello(ME).SerializeToString()
        assert await refusal(host.channel, attend, first, NO_MESSAGE) == VIOLATED


@pytest.mark.slow  # waits for the end of the log's interval
async def test_ten_thousand_refused_calls_are_logged_as_a_count(federation: Federation) -> None:
    locate = next(method for method in METHODS if method.name == "LocateUpload")
    before = await asyncio.to_thread(violations, federation)
    size = log_of(federation).stat().st_size
    begun = asyncio.get_running_loop().time()
    async with RawHost.of(federation.files.hosts[2]) as host:
        for _ in range(100):
            refused = await asyncio.gather(
                *(refusal(host.channel, locate, NO_MESSAGE) for _ in range(100))
            )
            assert set(refused) == {VIOLATED}
    intervals = 2 + (asyncio.get_running_loop().time() - begun) // INTERVAL_SECONDS
    assert await asyncio.to_thread(violations, federation) == before + 10_000
    assert log_of(federation).stat().st_size - size < 1_000 * intervals

    def counted() -> int:
        lines = map(json.loads, log_of(federation).read_text().splitlines())
        return sum(one["count"] for one in lines if one["event"] == "more calls refused")

    await until(lambda: counted() >= 9_999, "the refusals that were held back are told")


async def test_certificate_that_expires_ends_open_streams_and_new_calls(
    federation: Federation,
) -> None:
    """TLS checks the certificate once per connection, the coordinator with every call."""
    folder = federation.files.folder / "pki"
    begun = datetime.now(UTC) - timedelta(days=1) + timedelta(seconds=12)
    brief = pki.issue(folder, Role.HOST, "brief", clients=[ME], days=1, now=begun)
    locate = next(method for method in METHODS if method.name == "LocateUpload")
    request = coordinator_pb2.LocateUploadRequest(client_id=ME, update_id="x/1.1/x")
    expired = (Status.PERMISSION_DENIED, "CERTIFICATE_EXPIRED")
    async with (
        RawHost(federation.files.operator.coordinator, tls_files(brief)) as host,
        host.attending(ME) as call,
    ):
        before = await refusal(host.channel, locate, request.SerializeToString())
        assert before == (Status.FAILED_PRECONDITION, "ROUND_CLOSED")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await call.read()
        assert refusal_of(ended.value) == expired
        assert datetime.now(UTC) < begun + timedelta(days=1, seconds=20)
        assert await refusal(host.channel, locate, request.SerializeToString()) == expired
        assert await host.talk(hello(ME)) == expired


async def test_tls_below_1_3_is_refused(federation: Federation) -> None:
    files = federation.files.operator.tls
    host, _, port = federation.files.operator.coordinator.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.transport.abort()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(host, int(port), ssl=context)
