"""Requests for metrics from anyone on the network."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from support.pki import make_federation

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.monitoring.metrics_server import MetricsTls, monitoring

INSTRUMENTS = Instruments(MeasuredParty.HOST)
REQUEST = b"GET /metrics HTTP/1.1\r\n\r\n"
ANOTHER_INTERFACE = "127.0.0.2"


async def asked(host: str, port: int, tls: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    writer.write(REQUEST)
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_metrics_port_listens_only_on_loopback_by_default() -> None:
    async with monitoring("0", INSTRUMENTS) as address:
        port = int(address.rpartition(":")[2])
        assert b"potluck_build_info" in await asked("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            await asked(ANOTHER_INTERFACE, port)
    async with monitoring("0.0.0.0:0", INSTRUMENTS) as address:
        port = int(address.rpartition(":")[2])
        assert b"potluck_build_info" in await asked(ANOTHER_INTERFACE, port), "asked for"


async def test_metrics_request_without_a_certificate_gets_no_answer(tmp_path: Path) -> None:
    parties = make_federation(tmp_path, hosts={})
    tls = MetricsTls(**parties.coordinator.model_dump(), scrapers=("operator",))
    without = ssl.create_default_context(cafile=tls.authority)
    async with monitoring("0.0.0.0:0", INSTRUMENTS, tls=tls) as address:
        port = int(address.rpartition(":")[2])
        assert b"potluck" not in await asked("127.0.0.1", port)
        try:
            answer = await asked("127.0.0.1", port, without)
        except (ssl.SSLError, ConnectionError):
            answer = b""
        assert answer == b""
