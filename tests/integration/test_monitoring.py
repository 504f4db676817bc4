"""The metrics address over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from support.pki import TestFederation, make_federation

from potluck.common.errors import ConfigurationError, IdentityError, UnreachableError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.monitoring.metrics_server import MetricsTls, monitoring, parse_address
from potluck.common.net.tls import TlsFiles

INSTRUMENTS = Instruments(MeasuredParty.HOST)


async def ask(address: str, request: bytes) -> tuple[int, bytes, bytes]:
    """Return status, headers and body of the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


async def get(address: str, path: str) -> tuple[int, bytes]:
    status, _, body = await ask(address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return status, body


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),  # noqa: S104  # only parsed
        ("localhost:80", ("localhost", 80)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_metrics_port_without_a_host_listens_on_loopback(
    text: str, address: tuple[str, int]
) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["metrics", "1.2.3.4", "a:b", "127.0.0.1:65536", "::1:80", "a b:1"]
)
def test_invalid_metrics_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
        parse_address(text)


async def test_metrics_health_and_readiness_are_served() -> None:
    why = "still importing"
    async with monitoring("127.0.0.1:0", INSTRUMENTS, lambda: why) as address:
        for path in ("/metrics", "/metrics?name=x"):
            status, body = await get(address, path)
            assert status == 200
            assert b"# TYPE potluck_build_info gauge" in body
        assert await get(address, "/healthz") == (200, b"ok\n")
        assert await get(address, "/readyz") == (503, b"still importing\n")
        why = ""
        assert await get(address, "/readyz") == (200, b"ok\n")
        assert (await get(address, "/etc/passwd"))[0] == 404


async def test_other_methods_and_invalid_requests_are_refused() -> None:
    async with monitoring("0", INSTRUMENTS) as address:
        assert (await ask(address, b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await ask(address, b"\x16\x03\x01\r\n\r\n"))[0] == 400
        status, head, body = await ask(address, b"HEAD /healthz HTTP/1.0\r\n\r\n")
        assert (status, body) == (200, b"")
        assert b"Content-Length: 3" in head


async def test_endless_request_does_not_block_other_requests() -> None:
    async with monitoring("0", INSTRUMENTS) as address:
        port = int(address.rpartition(":")[2])
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        try:
            for each in sockets:
                each.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 20_000)
            assert (await get(address, "/healthz"))[0] == 200
        finally:
            for each in sockets:
                each.close()


async def test_metrics_server_listens_only_with_an_address_and_until_closed() -> None:
    async with monitoring("", INSTRUMENTS) as address:
        assert address == ""
    async with monitoring("0", INSTRUMENTS) as address:
        pass
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await get(address, "/healthz")


async def test_metrics_port_in_use_is_an_error_that_names_the_address() -> None:
    async with monitoring("0", INSTRUMENTS) as address:
        with pytest.raises(UnreachableError, match=address):
            async with monitoring(address, INSTRUMENTS):
                pass


# Mutual TLS -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    """Return certificates of a separate authority for metrics: coordinators serve, operators
    scrape."""
    return make_federation(tmp_path_factory.mktemp("metrics"))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    return make_federation(tmp_path_factory.mktemp("federation"))


def serving(files: TlsFiles, *scrapers: str) -> MetricsTls:
    return MetricsTls(**files.model_dump(), scrapers=scrapers)


def asking(authority: Path, files: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


async def scraped(address: str, tls: ssl.SSLContext) -> bytes:
    """Return the answer to a scraper. Raises OSError if there is none."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        if not answer:
            raise ConnectionError("it hung up")
        return answer
    finally:
        writer.close()


async def test_scraper_with_an_allowed_certificate_is_served(parties: TestFederation) -> None:
    tls = serving(parties.coordinator, "operator")
    async with monitoring("0", INSTRUMENTS, tls=tls) as address:
        answer = await scraped(address, asking(tls.authority, parties.operator))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"potluck_build_info" in answer


async def test_scraper_without_an_allowed_certificate_is_refused(
    parties: TestFederation, federation: TestFederation
) -> None:
    tls = serving(parties.coordinator, "operator")
    async with monitoring("0", INSTRUMENTS, tls=tls) as address:
        for files in (None, federation.operator, federation.hosts["host-0"]):
            with pytest.raises(OSError):  # noqa: PT011  # a reset or an alert, as it comes
                await scraped(address, asking(tls.authority, files))
        plain = await asyncio.open_connection(*address.split(":"))
        plain[1].write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"potluck" not in await plain[0].read()
        plain[1].close()
        unnamed = await scraped(address, asking(tls.authority, parties.hosts["host-0"]))
        assert unnamed.startswith(b"HTTP/1.1 403 ")
        assert b"potluck_" not in unnamed
    async with monitoring("0", INSTRUMENTS, tls=serving(parties.coordinator, "another")) as address:
        unnamed = await scraped(address, asking(tls.authority, parties.operator))
        assert unnamed.startswith(b"HTTP/1.1 403 ")


def test_metrics_certificate_that_could_impersonate_the_coordinator_is_refused(
    parties: TestFederation, federation: TestFederation
) -> None:
    serving(parties.coordinator, "operator").check(federation.hosts["host-0"])
    with pytest.raises(ConfigurationError, match="could pose as the coordinator"):
        serving(federation.coordinator, "operator").check(federation.hosts["host-0"])
    with pytest.raises(IdentityError, match="is for the role host"):
        serving(parties.hosts["host-0"], "operator").check(federation.hosts["host-0"])
