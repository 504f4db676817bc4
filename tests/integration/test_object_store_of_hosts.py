"""A host's transfers through an object store that sends wrong bytes, over real HTTP and mTLS."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.client_host import host_config, reference
from support.fake_coordinator import FakeCoordinator, serving
from support.fake_store import Change, FakeStore, fake_store
from support.pki import TestFederation
from support.promises import in_time

from potluck.client.base.host_metrics import HostMetrics
from potluck.client.transfer.download import Downloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.client.transfer.object_stores import ObjectStores
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.client.transfer.upload import deliver
from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.net.tls import channel
from potluck.common.net.transfer import FileReceiver
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.layout import Layout
from potluck.rpc.v1 import transfer_pb2

CONTENT = random.Random(0).randbytes(3_000_000)
UPDATE = random.Random(1).randbytes(2_500_000)


@dataclass
class Scene:
    """The link of a host, with a fake coordinator and a fake store."""

    folder: Path
    store: FakeStore
    fake: FakeCoordinator
    link: Link
    downloads: Downloads
    metrics: HostMetrics

    async def fetch(self) -> bytes:
        model = reference(self.fake.offer(CONTENT), len(CONTENT))
        path = await self.downloads.obtain(model, no_layout)
        return path.read_bytes()

    async def deliver(self, *, fresh: bool = True, content: bytes = UPDATE) -> bytes:
        path = self.folder / "update"
        path.write_bytes(content)
        update = KeptUpdate(
            update_id="run/1/1/client-0",
            client_id="client-0",
            run_id="run",
            round=1,
            blake3=digest_of(UPDATE),
            size=len(UPDATE),
            encoding=transfer_pb2.ENCODING_FLOAT32,
            delta=False,
            compressed=False,
            expires=2e9,
        )
        await deliver(self.link, update, path, fresh=fresh)
        return self.fake.uploads[update.update_id].content


async def no_layout() -> Layout:
    raise AssertionError("a float32 file needs none")


@pytest.fixture
async def scene(tmp_path: Path, federation: TestFederation) -> AsyncIterator[Scene]:
    with fake_store() as store:
        fake = FakeCoordinator(store=store, direct=False)
        async with serving(fake, federation.coordinator) as port:
            config = host_config(tmp_path, federation.hosts["host-0"], port)
            metrics = HostMetrics()
            link = Link(
                lambda: channel(config.coordinator, config.tls),
                generator=random.Random(0),
                maximum_seconds=0.01,
                concurrent=4,
                metrics=metrics,
                stores=ObjectStores([store.origin], metrics=metrics),
            )
            link.stores.offered = True
            for name in ("models", "fetched"):
                (tmp_path / name).mkdir()
            cache = ModelCache(tmp_path / "models", keep=2)
            downloads = Downloads(link, cache, tmp_path / "fetched", maximum_bytes=1 << 30)
            yield Scene(tmp_path, store, fake, link, downloads, metrics)
            await link.close()


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def longer(content: bytes) -> bytes:
    return content + bytes(100_000)


def shorter(content: bytes) -> bytes:
    return content[:-100_000]


def other(content: bytes) -> bytes:
    return bytes(len(content))


async def test_host_downloads_the_model_from_the_store_only(scene: Scene) -> None:
    assert await scene.fetch() == CONTENT
    assert scene.store.methods() == ["GET"]
    metrics = scene.metrics.instruments.exposition().decode()
    assert 'potluck_host_object_store_bytes_total{direction="down"} 3e+06' in metrics


async def test_model_is_kept_if_the_client_leaves_while_it_is_verified(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, may_end = threading.Event(), threading.Event()
    finish = FileReceiver.finish

    def slowly(receiver: FileReceiver, blake3: str) -> Path:
        path = finish(receiver, blake3)
        verified.set()
        may_end.wait()
        return path

    monkeypatch.setattr(FileReceiver, "finish", slowly)
    leaving = asyncio.create_task(scene.fetch())
    await in_time(0, asyncio.to_thread(verified.wait))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    may_end.set()
    assert await scene.fetch() == CONTENT
    assert scene.store.methods() == ["GET"]


@pytest.mark.parametrize("change", [flipped, longer, shorter, other])
async def test_host_discards_store_bytes_that_are_not_the_model(
    scene: Scene, change: Change
) -> None:
    scene.store.changes = [change]
    assert await scene.fetch() == CONTENT
    assert bool(scene.fake.distrusted) == (change in (flipped, other))


async def test_host_retries_a_store_that_sends_wrong_bytes_until_it_recovers(scene: Scene) -> None:
    scene.store.changes = [flipped] * 8
    with capture_logs() as logs:
        assert await scene.fetch() == CONTENT
    blamed = [
        line
        for line in logs
        if line["event"] == "object store returned different bytes than were stored"
    ]
    assert [line["store"] for line in blamed] == [scene.store.origin]
    assert logs[-1]["event"] == "object store recovered: its bytes match their digest"
    assert scene.fake.distrusted == 8


async def test_host_repeats_its_upload_while_the_store_returns_wrong_bytes(scene: Scene) -> None:
    scene.fake.mismatches = 5
    with capture_logs() as logs:
        assert await scene.deliver() == UPDATE
    assert "object store returned different bytes than were stored" in {
        line["event"] for line in logs
    }
    assert scene.store.methods() == ["PUT"] * 6


async def test_damaged_local_update_is_reported_as_a_storage_error(scene: Scene) -> None:
    scene.fake.mismatches = 1
    damaged = longer(UPDATE)[-len(UPDATE) :]
    with pytest.raises(StorageError, match="update is damaged"):
        await scene.deliver(content=damaged)


async def test_host_falls_back_to_a_direct_download_after_three_wrong_answers(scene: Scene) -> None:
    scene.fake.direct = True
    scene.store.changes = [flipped] * 3
    assert await scene.fetch() == CONTENT
    assert len(scene.store.asked) == 3


async def test_interrupted_store_download_resumes_at_its_offset(scene: Scene) -> None:
    scene.store.cuts = [1_500_000]
    assert await scene.fetch() == CONTENT
    [_, (_, _, headers)] = scene.store.asked
    begin = int(headers["Range"].removeprefix("bytes=").rstrip("-"))
    assert 0 < begin <= 1_500_000


@pytest.mark.parametrize("status", [302, 403, 404, 500, 206])
async def test_host_follows_no_redirect_of_the_store(scene: Scene, status: int) -> None:
    scene.store.statuses = [status]
    assert await scene.fetch() == CONTENT
    assert {path for _, path, _ in scene.store.asked} == {f"/{digest_of(CONTENT)}"}


async def test_host_does_not_contact_a_store_that_its_owner_does_not_allow(scene: Scene) -> None:
    with fake_store() as forbidden:
        scene.fake.named = forbidden.origin
        with pytest.raises(ConfigurationError, match="object_stores"):
            await scene.fetch()
        with pytest.raises(ConfigurationError, match="object_stores"):
            await scene.deliver()
        scene.fake.direct = True
        assert await scene.fetch() == CONTENT
        assert await scene.deliver() == UPDATE
        assert forbidden.asked == []
    assert scene.store.asked == []


async def test_host_puts_its_update_into_the_store_and_announces_it(scene: Scene) -> None:
    assert await scene.deliver() == UPDATE
    [(method, _, headers)] = scene.store.asked
    assert method == "PUT"
    assert headers["Content-Length"] == str(len(UPDATE))
    assert len(headers["x-amz-checksum-sha256"]) == 44
    assert [header.stored for header in scene.fake.headers] == [True]


async def test_update_that_is_already_stored_is_not_put_again(scene: Scene) -> None:
    scene.store.objects[f"/{digest_of(UPDATE)}"] = UPDATE
    assert await scene.deliver(fresh=False) == UPDATE
    assert scene.store.asked == []


async def test_host_repeats_a_failed_put_until_it_succeeds(scene: Scene) -> None:
    scene.store.statuses = [500, 403, 302, 503]
    assert await scene.deliver() == UPDATE
    assert scene.store.methods() == ["PUT"] * 5


async def test_host_falls_back_to_a_direct_upload_if_the_store_refuses(scene: Scene) -> None:
    scene.fake.direct = True
    scene.store.statuses = [500] * 10
    assert await scene.deliver() == UPDATE
    assert scene.store.methods() == ["PUT"] * 3


async def test_host_transfers_directly_if_the_store_is_unreachable(scene: Scene) -> None:
    with fake_store() as gone:
        pass
    scene.link.stores = ObjectStores([gone.origin])
    scene.link.stores.offered = True
    scene.fake.named, scene.fake.direct = gone.origin, True
    assert await scene.fetch() == CONTENT
    assert await scene.deliver() == UPDATE
    assert os.listdir(scene.folder / "fetched") == []  # noqa: PTH208  # names alone
