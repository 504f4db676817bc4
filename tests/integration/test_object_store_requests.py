"""Files of several pieces and parts, between the coordinator's side, an S3 server and a host's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from support.s3_server import ENVIRONMENT, S3Server, s3_server

from potluck.client.transfer.object_stores import ObjectStores
from potluck.common.errors import ObjectStoreError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.monitoring.metric_labels import MeasuredParty
from potluck.common.net.transfer import FileReceiver
from potluck.common.tensors.digest import digest_of
from potluck.integrations.s3.object_store import ListedObject, ObjectStore
from potluck.integrations.s3.stored_files import StoredFiles, StoredUpdates
from potluck.rpc.v1 import transfer_pb2
from potluck.server.config import FilesSettings
from potluck.server.store.model_files import ModelFiles

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CONTENT = random.Random(0).randbytes(18_000_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HEADER = transfer_pb2.UpdateHeader(
    run_id="run", update_id="run/1", client_id="me", blake3=digest_of(CONTENT), size=len(CONTENT)
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def settings(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> FilesSettings:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return FilesSettings(**server.files())


def receiver(path: Path, offset: int) -> FileReceiver:
    return FileReceiver(
        path, blake3=HEADER.blake3, size=HEADER.size, offset=offset, maximum=1 << 30
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


async def test_model_of_several_parts_is_fetched_by_its_url(
    server: S3Server, settings: FilesSettings, file: Path, tmp_path: Path
) -> None:
    store = ObjectStore(settings, Instruments(MeasuredParty.COORDINATOR))
    assert await store.size_of("models/a") is None
    await store.put("models/a", file, size=len(CONTENT))
    assert await store.size_of("models/a") == len(CONTENT)
    host, target = ObjectStores([server.origin]), tmp_path / "model"
    url = store.url_to_fetch("models/a")
    await host.fetch(url, lambda offset: receiver(target, offset), offset=0)
    assert target.read_bytes() == CONTENT


async def test_update_is_put_by_its_url_and_its_collection_resumes(
    server: S3Server, settings: FilesSettings, file: Path, tmp_path: Path
) -> None:
    store = ObjectStore(settings, Instruments(MeasuredParty.COORDINATOR))
    updates, target = StoredUpdates(store), tmp_path / "update"
    host = ObjectStores([server.origin])
    url = updates.url(HEADER, SHA256)
    await host.put(url, file, size=len(CONTENT), sha256=SHA256)
    assert await updates.lies_there(HEADER)
    moved: list[int] = []
    with closing(receiver(target, 0)) as begun:
        begun.write(CONTENT[:5_000_001])
    with closing(receiver(target, 5_000_001)) as resumed:
        await updates.collect(HEADER, resumed, moved.append)
        resumed.finish(HEADER.blake3)
    assert target.read_bytes() == CONTENT
    assert sum(moved) == len(CONTENT) - 5_000_001
    assert len(moved) == 4


async def test_failed_store_is_not_contacted_again_at_once(settings: FilesSettings) -> None:
    unreachable = settings.model_copy(update={"endpoint": "http://127.0.0.1:1"})
    store = ObjectStore(unreachable, Instruments(MeasuredParty.COORDINATOR))
    with pytest.raises(ObjectStoreError, match="failed"):
        await store.size_of("x")
    with pytest.raises(ObjectStoreError, match="the coordinator tries again soon"):
        await store.size_of("x")
    assert "127.0.0.1:1" in await store.probe()


async def test_sweep_keeps_objects_that_are_new_or_on_disk(
    settings: FilesSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    kept = "a" * 64
    (folder / f"{kept}.safetensors").touch()
    stored = StoredFiles(settings, ModelFiles(folder), Instruments(MeasuredParty.COORDINATOR))
    now = datetime.now(UTC)
    listed = [
        ListedObject(f"models/{kept}.safetensors", now - timedelta(days=9)),
        ListedObject(f"models/{'b' * 64}.safetensors", now),
        ListedObject("updates/new", now - timedelta(minutes=50)),
        ListedObject("updates/left", now - timedelta(minutes=70)),
        ListedObject("somebody-else/s", now - timedelta(days=9)),
    ]
    deleted: list[str] = []

    async def list_all() -> list[ListedObject]:
        return listed

    async def delete(keys: list[str]) -> None:
        deleted.extend(keys)

    monkeypatch.setattr(stored.store, "listed", list_all)
    monkeypatch.setattr(stored.store, "delete", delete)
    await stored.sweep()
    assert deleted == [f"models/{'b' * 64}.safetensors", "updates/left"]
