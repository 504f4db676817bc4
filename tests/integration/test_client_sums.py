"""A host that sums the updates of its clients, against a scripted coordinator over mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.client_host import summed_instruction
from support.fake_coordinator import serving
from support.host_scene import Scene
from support.pki import TestFederation

from potluck.client.handlers import host_sums
from potluck.common.errors import LayoutError, PotluckError, RoundClosedError
from potluck.common.updates.fixed_point import Words, members_digest
from potluck.common.updates.sum_files import BODY, opened_sum_file
from potluck.rpc.v1 import transfer_pb2

NAMES = ("a", "b", "c")


@pytest.fixture
async def scene(tmp_path: Path, federation: TestFederation) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path, federation)
    async with serving(scene.fake, federation.coordinator) as port:
        scene.port = port
        yield scene


def instruct(
    scene: Scene, *names: str, companions: Sequence[str] = NAMES, seconds: float = 60
) -> None:
    """Send instructions of one attempt to the clients of these trainings."""
    model = scene.model()
    for name in names:
        client = f"client-{NAMES.index(name)}"
        scene.fake.instruct(
            summed_instruction(name, model, companions, client=client, seconds=seconds)
        )


def members(header: transfer_pb2.UpdateHeader) -> set[str]:
    return {each.update_id for each in header.members}


async def arrived(scene: Scene, *groups: str) -> None:
    """Wait until the sums of these members have arrived, e.g. "ab" and "c"."""
    wanted = [set(group) for group in groups]

    def complete() -> bool:
        found = [members(each.header) for each in scene.fake.uploads.values() if each.complete]
        return all(group in found for group in wanted)

    await scene.fake.until(complete)


def words(scene: Scene, names: str) -> Words:
    """Return the words of the received sum of these members."""
    [upload] = [u for u in scene.fake.uploads.values() if members(u.header) == set(names)]
    path = scene.folder / "upload"
    path.write_bytes(upload.content)
    with opened_sum_file(path) as file:
        file.check(members_digest(names), len(names))
        return file.reader(BODY)(0, file.vectors[BODY])


async def test_host_sends_one_sum_for_its_clients_in_an_attempt(scene: Scene) -> None:
    async with scene.host():
        instruct(scene, *NAMES)
        await arrived(scene, "abc")
    [header] = scene.fake.headers
    assert not header.HasField("report")
    assert (header.client_id, header.update_id) == (
        header.members[0].client_id,
        header.members[0].update_id,
    )
    assert all(each.report.samples > 0 and each.report.loss > 0 for each in header.members)
    together = words(scene, "abc")
    scene.fake.uploads.clear()
    for name in NAMES:  # each in a sum of one, from its own host folder
        scene.folder = scene.folder / name
        scene.folder.mkdir()
        async with scene.host():
            instruct(scene, name, companions=())
            await arrived(scene, name)
    alone = sum(words(scene, name) for name in NAMES)
    assert np.array_equal(together, np.asarray(alone))
    assert np.any(together)


async def test_sum_is_sent_without_a_client_whose_training_failed(scene: Scene) -> None:
    async with scene.host():
        instruct(scene, "a", "b")
        scene.fake.instruct(
            summed_instruction("c", scene.model(), NAMES, client="client-2", task="unknown")
        )
        await scene.fake.answered("c")
        await arrived(scene, "ab")


async def test_sum_is_repeated_without_clients_that_the_coordinator_dropped(scene: Scene) -> None:
    def without_b(header: transfer_pb2.UpdateHeader) -> PotluckError | None:
        gone = "b" in members(header)
        return RoundClosedError("b is late", clients="client-1") if gone else None

    scene.fake.judge = without_b
    async with scene.host():
        instruct(scene, *NAMES)
        await arrived(scene, "ac")
        await scene.fake.idle()
    assert [len(header.members) for header in scene.fake.headers] == [3, 2]
    assert scene.fake.answers == []


async def test_updates_of_a_refused_sum_are_sent_one_by_one(scene: Scene) -> None:
    def with_b(header: transfer_pb2.UpdateHeader) -> PotluckError | None:
        return LayoutError("what b says can't be") if "b" in members(header) else None

    scene.fake.judge = with_b
    async with scene.host():
        instruct(scene, *NAMES)
        await arrived(scene, "a", "c")
        answer = await scene.fake.answered("b")
    assert answer.failure.message == "what b says can't be"


async def test_sum_is_sent_if_a_client_never_receives_its_instruction(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sums, "ARRIVAL_SECONDS", 3.0)
    async with scene.host():
        instruct(scene, "a", "b")
        await arrived(scene, "ab")


async def test_sum_waits_for_a_slow_client_until_shortly_before_the_deadline(scene: Scene) -> None:
    async with scene.host():
        instruct(scene, "a", companions=())
        await arrived(scene, "a")  # the host now has the model
        scene.fake.uploads.clear()
        instruct(scene, "b", companions=("b", "c"), seconds=9)
        scene.fake.hold_downloads = asyncio.Event()
        other = scene.model(seed=1)
        scene.fake.instruct(summed_instruction("c", other, ("b", "c"), client="client-2"))
        await arrived(scene, "b")
        scene.fake.hold_downloads.set()
        await arrived(scene, "c")


async def test_sum_is_sent_without_a_client_whose_training_was_cancelled(scene: Scene) -> None:
    async with scene.host():
        instruct(scene, "a")
        await scene.fake.until(lambda: "a" in scene.fake.acknowledged)
        scene.fake.hold_downloads = asyncio.Event()
        other = scene.model(seed=1)
        scene.fake.instruct(summed_instruction("b", other, NAMES, client="client-1"))
        instruct(scene, "c")
        await scene.fake.downloading("b")
        scene.fake.abandon("b")
        scene.fake.hold_downloads.set()
        await arrived(scene, "ac")


async def test_restarted_host_sends_the_same_sum(scene: Scene) -> None:
    scene.fake.hold_uploads = asyncio.Event()
    async with scene.host():
        instruct(scene, *NAMES)
        await scene.fake.until(lambda: scene.fake.held_uploads == 1)
    # Wait until the first host's upload has ended: the cut is for the second host's upload.
    await scene.fake.until(lambda: scene.fake.held_uploads == 0)
    scene.fake.hold_uploads.set()
    scene.fake.cut_upload_after = [1000]
    scene.fake.files.clear()  # a second training would fail
    async with scene.host():
        instruct(scene, *NAMES)
        await arrived(scene, "abc")
    assert len({(header.blake3, header.size) for header in scene.fake.headers}) == 1
    assert 1000 in [header.offset for header in scene.fake.headers]
    assert list((scene.folder / "state" / "updates").glob("sum*")) == []
