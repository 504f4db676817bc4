"""The coordinator's client of a bucket, with a fake of its library or a fake store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.integrations.s3 import object_store
from potluck.integrations.s3.object_store import ObjectStore
from potluck.server.config import FilesSettings

SLOW_LINE = 0.5e6 / 8  # bytes per second
LEAST_PART = 5 << 20  # of S3


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


async def test_concurrent_parts_of_a_model_fit_into_the_time_limit_on_a_slow_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []

    def client(*_: object, client_options: dict[str, Any], **__: object) -> float:
        return float(client_options["timeout"].total_seconds())

    async def put(
        seconds: float, key: str, path: Path, *, chunk_size: int, max_concurrency: int
    ) -> None:
        assert (key, path, chunk_size) == ("models/a", tmp_path, LEAST_PART)
        limits.append(seconds * SLOW_LINE / (chunk_size * max_concurrency))

    monkeypatch.setattr(object_store, "S3Store", client)
    monkeypatch.setattr("obstore.put_async", put)
    settings = FilesSettings(store="s3://bucket/x", endpoint="https://store.example.org")
    store = ObjectStore(settings, Instruments(MeasuredParty.COORDINATOR))
    await store.put("models/a", tmp_path, size=100_000_000)
    [spare] = limits
    assert spare > 1.5


async def test_probe_of_an_unresponsive_store_names_the_time_limit_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_store: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("obstore.list_with_delimiter_async", never)
    monkeypatch.setattr(object_store, "_PROBE_SECONDS", 0)
    instruments = Instruments(MeasuredParty.COORDINATOR)
    settings = FilesSettings(store="s3://bucket/x", endpoint="https://store.example.org")
    store = ObjectStore(settings, instruments)
    with capture_logs() as logs:
        said = await store.probe()
    assert said == (
        "the object store https://store.example.org/bucket/x did not answer within 0 s; check the "
        "store, its address and the network"
    )
    assert store.trouble
    assert [line["event"] for line in logs] == ["object store failed"]
    assert "potluck_object_store_up 0.0" in instruments.exposition().decode()
