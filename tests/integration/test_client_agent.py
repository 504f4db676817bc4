"""The client process's agent against a coordinator over real mutual TLS, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.client_host import (
    digits_model,
    evaluate_instruction,
    reference,
    train_instruction,
)
from support.fake_coordinator import FakeCoordinator, serving
from support.host_scene import Scene
from support.pki import TestFederation, make_federation

from potluck.client.training.update_encoding import write_update
from potluck.client.transfer.link import Link
from potluck.client.transfer.saved_updates import KeptUpdate
from potluck.client.transfer.upload import deliver
from potluck.common.errors import (
    IdentityError,
    NotFiniteError,
    ProtocolVersionError,
    RoundClosedError,
    StorageError,
)
from potluck.common.net.tls import channel
from potluck.common.net.transfer import FileReceiver
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.encoding import EncodedUpdate, Encoding, encode, encoded_layout
from potluck.common.tensors.tensor_files import FileDigest, open_tensors, write_tensors
from potluck.common.updates.update_report import UpdateReport
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2

PATIENCE_SECONDS = 240.0
ENDLESS_SECONDS = 10**14
FAULTY = Path(__file__).parents[1] / "support" / "faulty_plugins"


@pytest.fixture
async def scene(tmp_path: Path, federation: TestFederation) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path, federation)
    async with serving(scene.fake, federation.coordinator) as port:
        scene.port = port
        yield scene


async def test_host_registers_its_clients_and_trains(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        hello = scene.fake.hellos[0]
        assert list(hello.client_ids) == [f"client-{n}" for n in range(6)]
        assert hello.device == "cpu"
        assert "digits" in hello.tasks
        scene.fake.instruct(train_instruction("a", model))
        upload = await scene.fake.completed("a")
        await scene.fake.until(lambda: "a" in scene.fake.acknowledged)
    report = upload.header.report
    assert report.samples > 0
    assert report.steps == -(-report.samples // 16)
    assert report.loss > 0
    before, after = scene.fake.files[model.blake3], upload.content
    assert len(before) == len(after)
    assert before != after
    assert scene.fake.answers == []


async def test_host_survives_durations_that_no_clock_can_add(scene: Scene) -> None:
    model = scene.model()
    scene.fake.heartbeat_interval.seconds = ENDLESS_SECONDS
    scene.fake.hold_downloads = asyncio.Event()
    instruction = train_instruction("a", model)
    instruction.time_left.seconds = ENDLESS_SECONDS
    async with scene.host():
        for times in (1, 2):  # the second one extends the deadline
            scene.fake.instruct(instruction)
            await scene.fake.until(lambda: scene.fake.acknowledged.count("a") == times)  # noqa: B023  # awaited at once
        scene.fake.hold_downloads.set()
        await scene.fake.completed("a")
    assert scene.fake.arrivals == 1
    assert scene.fake.answers == []


async def test_same_instruction_gives_the_same_update_bytes(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        uploads = []
        for name, client in (("a", "client-0"), ("other", "client-1"), ("b", "client-0")):
            scene.fake.instruct(train_instruction(name, model, client=client))
            uploads.append(await scene.fake.completed(name))
    assert uploads[0].content == uploads[2].content
    assert uploads[0].content != uploads[1].content


async def test_clients_of_a_host_share_one_model_download_across_restarts(scene: Scene) -> None:
    model = scene.model()
    names = [f"t{n}" for n in range(6)]
    async with scene.host():
        for number, name in enumerate(names):
            scene.fake.instruct(train_instruction(name, model, client=f"client-{number}"))
        for name in names:
            await scene.fake.completed(name)
    async with scene.host():  # a restarted process still has the model
        scene.fake.instruct(train_instruction("later", model, round_=2))
        await scene.fake.completed("later")
    assert scene.fake.fetches == [(model.blake3, 0)]


async def test_repeated_instruction_is_not_trained_again(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
        await scene.fake.idle()
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.until(lambda: scene.fake.acknowledged.count("a") == 2)
        scene.fake.instruct(evaluate_instruction("e", model))
        await scene.fake.answered("e")
    assert len(scene.fake.headers) == 1


async def test_lost_update_is_sent_again_without_training(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        first = await scene.fake.completed("a")
        await scene.fake.idle()
        scene.fake.uploads.clear()
        scene.fake.files.clear()  # a second training would fail
        scene.fake.instruct(train_instruction("a", model))
        assert (await scene.fake.completed("a")).content == first.content


async def test_update_that_the_owner_no_longer_allows_is_not_sent_again(
    scene: Scene, tmp_path: Path
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
        await scene.fake.idle()
    async with scene.host(disclosure={"updates": "private"}):
        scene.fake.instruct(train_instruction("a", model))
        answer = await scene.fake.answered("a")
    assert answer.failure.reason == "DISCLOSURE_REFUSED"
    assert len(scene.fake.headers) == 1
    assert list((tmp_path / "state" / "updates").iterdir()) == []


async def test_interrupted_download_resumes_at_its_offset(scene: Scene) -> None:
    content = np.random.default_rng(0).bytes(1 << 20)
    broken = scene.fake.offer(content)
    scene.fake.cut_download_after = [1 << 18, 1 << 17]
    async with scene.host():
        scene.fake.instruct(train_instruction("a", reference(broken, len(content))))
        answer = await scene.fake.answered("a")  # a failure: the content is not a model
    assert answer.failure.reason == "UPDATE_LAYOUT_MISMATCH"
    assert scene.fake.fetches == [(broken, 0), (broken, 1 << 18), (broken, (1 << 18) + (1 << 17))]


async def test_interrupted_upload_resumes_at_its_offset(scene: Scene) -> None:
    model = scene.model()
    scene.fake.cut_upload_after = [10_000]
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        upload = await scene.fake.completed("a")
    first, second = scene.fake.headers
    assert (first.offset, second.offset) == (0, 10_000)
    assert len(upload.content) == model.size


async def test_download_with_a_wrong_digest_restarts_from_the_beginning(scene: Scene) -> None:
    model = scene.model()
    scene.fake.corrupt = 2
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
    assert scene.fake.fetches == [(model.blake3, 0)] * 3


async def test_download_fails_after_three_wrong_digests(scene: Scene) -> None:
    model = scene.model()
    scene.fake.corrupt = 100
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        answer = await scene.fake.answered("a")
    assert answer.failure.reason == "DIGEST_MISMATCH"
    assert len(scene.fake.fetches) == 3


@pytest.mark.parametrize(("mismatches", "delivered"), [(2, True), (3, False)])
async def test_upload_with_a_wrong_digest_restarts_from_the_beginning(
    scene: Scene, mismatches: int, delivered: bool
) -> None:
    scene.fake.mismatches = mismatches
    async with scene.host():
        scene.fake.instruct(train_instruction("a", scene.model()))
        if delivered:
            await scene.fake.completed("a")
        else:
            assert (await scene.fake.answered("a")).failure.reason == "DIGEST_MISMATCH"
    assert [header.offset for header in scene.fake.headers] == [0, 0, 0]


async def test_refused_update_is_not_sent_again(scene: Scene) -> None:
    scene.fake.refuse_update = NotFiniteError("tensor 'x' holds NaN")
    async with scene.host():
        scene.fake.instruct(train_instruction("a", scene.model()))
        answer = await scene.fake.answered("a")
    assert answer.failure.reason == "UPDATE_NOT_FINITE"
    assert len(scene.fake.headers) == 1


async def test_update_of_a_closed_round_is_deleted(scene: Scene, tmp_path: Path) -> None:
    scene.fake.refuse_update = RoundClosedError("the round is over")
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.until(lambda: len(scene.fake.headers) == 1)
        scene.fake.refuse_update = None
        scene.fake.instruct(train_instruction("b", model))
        await scene.fake.completed("b")
        scene.fake.instruct(_settle("s", round_=1))
        await scene.fake.until(lambda: "s" in scene.fake.acknowledged)
        assert list((tmp_path / "state" / "updates").iterdir()) == []
    assert scene.fake.answers == []


def _settle(name: str, *, round_: int) -> rpc.Instruction:
    return rpc.Instruction(
        id=name, client_id="client-0", run_id="run", round=round_, settle=rpc.Settle(included=True)
    )


async def test_failed_instruction_is_answered_with_a_one_line_message(scene: Scene) -> None:
    model = scene.model()
    small = {"learning_rate": 1e30, "epochs": 3}
    cases = {
        "diverges": (train_instruction("diverges", model, training=small), "TRAINING_FAILED"),
        "no task": (train_instruction("no task", model, task="chess"), "PLUGIN_INVALID"),
        "no option": (
            train_instruction("no option", model, options={"size": 1}),
            "PLUGIN_INVALID",
        ),
        "no client": (train_instruction("no client", model, client="x"), "IDENTITY_REFUSED"),
        "no work": (
            rpc.Instruction(id="no work", client_id="client-0"),
            "PROTOCOL_VERSION_UNSUPPORTED",
        ),
        "no model": (train_instruction("no model", reference("0" * 64, 5)), "NOT_FOUND"),
        "other model": (
            train_instruction("other model", model, task="colored-digits"),
            "UPDATE_LAYOUT_MISMATCH",
        ),
        "too large": (train_instruction("too large", reference("1" * 64, 2**60)), "TOO_LARGE"),
        "no held out": (evaluate_instruction("no held out", model), "NOTHING_HELD_OUT"),
    }
    for name in cases:
        cases[name][0].time_left.FromSeconds(60)
    async with scene.host():
        for name, (instruction, reason) in cases.items():
            scene.fake.instruct(instruction)
            failure = (await scene.fake.answered(name)).failure
            assert (name, failure.reason) == (name, reason)
            assert "\n" not in failure.message
            assert len(failure.message) > 20
        no_task = (await scene.fake.answered("no task")).failure.message
        assert "'chess' is not installed; installed: " in no_task
        assert ", colored-digits, " in no_task


FAULTS = {
    "missing": "task 'faulty' failed for client 'client-0': /nowhere/features.npy: No such file",
    "odd": "task 'faulty' failed for client 'client-0': this image is truncated; check",
    "torn": "task 'faulty' failed for client 'client-0': /mnt/share/scan.npy: Input/output error",
    "labels": "client 'client-0': task 'faulty' returned 20 inputs and 19 labels; these",
    "groups": "client 'client-0': task 'faulty' returned 20 inputs, 20 labels and 18 groups",
    "nan": "the inputs of client 'client-0' contain NaN or infinity, first in sample 17; correct",
}


async def test_failure_caused_by_a_task_names_the_task_code(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FAULTY)
    model = scene.model()
    async with scene.host():
        for fault, message in FAULTS.items():
            scene.fake.instruct(
                train_instruction(fault, model, task="faulty", options={"fault": fault})
            )
            failure = (await scene.fake.answered(fault)).failure
            of_the_data = fault in ("labels", "groups", "nan")
            assert failure.reason == ("DATA_INVALID" if of_the_data else "TRAINING_FAILED")
            assert failure.message.startswith(message)
            assert "\n" not in failure.message
        options = {"fault": "nan-held-out"}
        scene.fake.instruct(evaluate_instruction("e", model, task="faulty", options=options))
        assert (
            "the held-out data of client 'client-0'"
            in (await scene.fake.answered("e")).failure.message
        )


async def test_failure_of_the_disk_names_the_folder(scene: Scene, tmp_path: Path) -> None:
    model = scene.model()
    async with scene.host():
        updates = tmp_path / "state" / "updates"
        updates.rmdir()
        scene.fake.instruct(train_instruction("a", model))
        failure = (await scene.fake.answered("a")).failure
        updates.mkdir()
    assert failure.reason == "STORAGE_FAILED"
    assert str(updates) in failure.message


async def test_host_evaluates_a_model_on_held_out_samples(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(evaluate_instruction("e", model, options={"held_out": 0.25}))
        counts = (await scene.fake.answered("e")).evaluation
        scene.fake.instruct(evaluate_instruction("e", model, options={"held_out": 0.25}))
        assert (await scene.fake.answered("e", times=2)).evaluation == counts
    assert len(counts.confusion) == 100
    assert sum(counts.confusion) > 0
    assert counts.loss_sum > 0


async def test_cancelled_training_stops_and_the_next_one_starts(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        endless = train_instruction("endless", model, training={"epochs": 10_000_000})
        scene.fake.instruct(endless)
        scene.fake.instruct(train_instruction("waiting", model, client="client-1"))
        await scene.fake.computing("endless")
        scene.fake.instruct(_abandon("endless"))
        await scene.fake.completed("waiting")
    assert [header.update_id for header in scene.fake.headers] == ["waiting"]
    assert scene.fake.answers == []


async def test_training_cancelled_while_its_update_is_written_leaves_no_file(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, writing, go_on = scene.model(), threading.Event(), threading.Event()

    def write(*arguments: Any, **options: Any) -> FileDigest:
        writing.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return write_update(*arguments, **options)

    monkeypatch.setattr("potluck.client.training.local_update.write_update", write)
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        assert await asyncio.to_thread(writing.wait, PATIENCE_SECONDS)
        scene.fake.instruct(_abandon("a"))
        await scene.fake.idle()
        go_on.set()
        scene.fake.instruct(evaluate_instruction("e", model))
        await scene.fake.answered("e")  # same thread, so "a" has ended
        assert list((scene.folder / "state" / "updates").iterdir()) == []


async def test_model_is_fetched_again_while_a_cancelled_download_is_verified(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, honest = scene.model(), FileReceiver.finish
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def finish(self: FileReceiver, *arguments: Any, **options: Any) -> Path:
        if began.is_set():
            assert ended.wait(PATIENCE_SECONDS)
            return honest(self, *arguments, **options)
        began.set()
        assert go_on.wait(PATIENCE_SECONDS)
        try:
            return honest(self, *arguments, **options)
        finally:
            ended.set()

    monkeypatch.setattr(FileReceiver, "finish", finish)
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        assert await asyncio.to_thread(began.wait, PATIENCE_SECONDS)
        scene.fake.instruct(_abandon("a"))
        scene.fake.instruct(train_instruction("b", model))
        await scene.fake.downloading("b")
        go_on.set()
        await scene.fake.completed("b")
    assert scene.fake.answers == []


async def test_cancelled_training_is_done_if_requested_again(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        first = await scene.fake.completed("a")
        await scene.fake.idle()
        scene.fake.instruct(_abandon("a"))
        scene.fake.uploads.clear()
        scene.fake.instruct(train_instruction("a", model))
        assert (await scene.fake.completed("a")).content == first.content
        scene.fake.instruct(_settle("s", round_=1))
        scene.fake.uploads.clear()
        scene.fake.instruct(train_instruction("a", model))
        assert (await scene.fake.completed("a")).content == first.content


async def test_instruction_cancelled_before_its_arrival_is_refused_once(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(_abandon("a"))
        scene.fake.instruct(train_instruction("a", model))
        assert (await scene.fake.answered("a")).failure.reason == "ROUND_CLOSED"
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")


async def test_cancellations_of_a_previous_coordinator_do_not_apply_after_a_restart(
    scene: Scene,
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(_abandon("a"))
        await scene.fake.until(lambda: "abandon/a" in scene.fake.acknowledged)
        scene.fake.coordinator_id = "restarted"
        scene.fake.send_away()
        await scene.fake.until(lambda: len(scene.fake.hellos) == 2 and scene.fake.hosts == 1)
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
    assert scene.fake.answers == []


def _abandon(instruction_id: str) -> rpc.Instruction:
    abandon = rpc.Abandon(instruction_ids=[instruction_id])
    return rpc.Instruction(id=f"abandon/{instruction_id}", abandon=abandon)


async def test_instruction_with_a_known_id_and_another_model_is_trained(scene: Scene) -> None:
    first, second = scene.model(0), scene.model(1)
    async with scene.host():
        scene.fake.instruct(train_instruction("a", first))
        before = await scene.fake.completed("a")
        await scene.fake.idle()
        scene.fake.uploads.clear()
        scene.fake.instruct(train_instruction("a", second))
        after = await scene.fake.completed("a")
        scene.fake.instruct(train_instruction("b", second))
        assert (await scene.fake.completed("b")).content == after.content != before.content
    scene.fake.uploads.clear()
    async with scene.host():  # a stored update is sent only for the same work
        scene.fake.instruct(train_instruction("b", first))
        assert (await scene.fake.completed("b")).content == before.content


async def test_new_training_cancels_other_trainings_of_its_run(scene: Scene) -> None:
    """A coordinator restored from a backup does not know its later instructions."""
    model = scene.model()
    async with scene.host():
        endless = train_instruction("5", model, round_=5, training={"epochs": 10_000_000})
        scene.fake.instruct(endless)
        await scene.fake.computing("5")
        scene.fake.instruct(train_instruction("3", model, round_=3))
        await scene.fake.completed("3")
    assert [header.update_id for header in scene.fake.headers] == ["3"]


async def test_training_past_its_deadline_is_cancelled(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        late = train_instruction("late", model, training={"epochs": 10_000_000}, seconds=0.5)
        scene.fake.instruct(late)
        scene.fake.instruct(train_instruction("next", model, client="client-1"))
        await scene.fake.completed("next")
    assert [header.update_id for header in scene.fake.headers] == ["next"]


async def test_expired_instruction_repeated_with_a_new_deadline_is_delivered(scene: Scene) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.hold_uploads = asyncio.Event()
        scene.fake.instruct(train_instruction("a", model, seconds=8))
        await scene.fake.until(lambda: len(scene.fake.headers) == 1)
        await scene.fake.idle()
        scene.fake.hold_uploads.set()
        scene.fake.files.clear()  # a second training would fail
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")


async def test_host_reconnects_to_a_restarted_coordinator(
    tmp_path: Path, federation: TestFederation
) -> None:
    scene = Scene(tmp_path, federation)
    model = scene.model()
    async with serving(scene.fake, federation.coordinator) as port:
        scene.port = port
        host = scene.host()
        await host.__aenter__()
        scene.fake.hold_downloads = asyncio.Event()
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.until(lambda: len(scene.fake.fetches) == 1)
    try:
        again = FakeCoordinator(files=scene.fake.files)
        async with serving(again, federation.coordinator, port=port):
            await again.until(lambda: again.hosts == 1)
            again.instruct(train_instruction("a", model))
            await again.completed("a")
            again.instruct(train_instruction("b", model))
            await again.completed("b")
            assert [header.update_id for header in again.headers] == ["a", "b"]
    finally:
        await host.__aexit__(None, None, None)


async def test_upload_continues_after_the_control_stream_reconnects(scene: Scene) -> None:
    scene.fake.hold_uploads = asyncio.Event()
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.until(lambda: len(scene.fake.headers) == 1)
        scene.fake.send_away()
        await scene.fake.until(lambda: len(scene.fake.hellos) == 2 and scene.fake.hosts == 1)
        scene.fake.instruct(train_instruction("a", model))
        scene.fake.hold_uploads.set()
        await scene.fake.completed("a")
    assert len(scene.fake.headers) == 1


@contextlib.asynccontextmanager
async def delivery(scene: Scene, path: Path) -> AsyncIterator[tuple[Link, asyncio.Task[None]]]:
    """Start the delivery of a file, which the coordinator then holds up."""
    scene.fake.hold_uploads = asyncio.Event()
    content = b"weights"
    update = KeptUpdate(
        update_id="a",
        client_id="client-0",
        run_id="run",
        round=1,
        blake3=digest_of(content),
        size=len(content),
        encoding=transfer_pb2.ENCODING_FLOAT32,
        delta=False,
        compressed=False,
        report=UpdateReport(samples=1, steps=1, seconds=1.0, loss=1.0),
        expires=0.0,
    )
    tls = scene.federation.hosts["host-0"]
    link = Link(
        lambda: channel(f"127.0.0.1:{scene.port}", tls),
        generator=random.Random(0),
        maximum_seconds=0.1,
        concurrent=1,
        grace_seconds=0,
    )
    delivering = asyncio.create_task(deliver(link, update, path, fresh=True))
    await scene.fake.until(lambda: len(scene.fake.headers) == 1)
    yield link, delivering
    delivering.cancel()
    await link.close()


async def test_upload_restarts_if_its_connection_is_closed(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "update"
    path.write_bytes(b"weights")
    async with delivery(scene, path) as (link, delivering):
        link.renew()
        await scene.fake.until(lambda: len(scene.fake.headers) == 2)
        assert scene.fake.hold_uploads is not None
        scene.fake.hold_uploads.set()
        await delivering
        assert (await scene.fake.completed("a")).content == b"weights"


async def test_upload_of_a_missing_file_fails(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "update"
    path.write_bytes(b"weights")
    async with delivery(scene, path) as (link, delivering):
        path.unlink()
        link.renew()
        with pytest.raises(StorageError, match=f"{path}: No such file"):
            await delivering


async def test_deleted_update_file_is_reported_as_a_storage_failure(
    scene: Scene, tmp_path: Path
) -> None:
    model = scene.model()
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
        await scene.fake.idle()
        next((tmp_path / "state" / "updates").glob("*.safetensors")).unlink()
        scene.fake.instruct(train_instruction("a", model))
        assert (await scene.fake.answered("a")).failure.reason == "STORAGE_FAILED"


async def test_deleted_model_file_is_downloaded_again(scene: Scene, tmp_path: Path) -> None:
    model = scene.model()
    async with scene.host():
        for name in ("a", "b"):
            scene.fake.instruct(train_instruction(name, model))
            await scene.fake.completed(name)
            (tmp_path / "state" / "models" / model.blake3).unlink()
    assert scene.fake.fetches == [(model.blake3, 0)] * 2


@pytest.mark.parametrize(
    "error", [ProtocolVersionError("speak version 2"), IdentityError("not your client")]
)
async def test_host_does_not_reconnect_after_a_permanent_refusal(
    scene: Scene, error: Exception
) -> None:
    scene.fake.refuse_hello = error  # type: ignore[assignment]  # both are PotluckErrors
    with pytest.raises(type(error), match=str(error)):
        async with scene.host():
            pass
    assert len(scene.fake.hellos) == 1


async def test_client_that_the_certificate_does_not_name_is_refused(scene: Scene) -> None:
    with pytest.raises(IdentityError, match="client 'client-6'"):
        async with scene.host(clients=("client-0:6",)):
            pass


async def test_host_refuses_a_coordinator_of_another_authority(
    scene: Scene, tmp_path: Path
) -> None:
    scene.federation = make_federation(tmp_path / "other")
    with pytest.raises(IdentityError, match="did not sign"):
        async with scene.host():
            pass
    assert scene.fake.hellos == []


@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.BFLOAT16, Encoding.FLOAT32])
@pytest.mark.parametrize("delta", [False, True])
async def test_models_and_updates_are_exchanged_in_each_encoding(
    scene: Scene, tmp_path: Path, encoding: Encoding, delta: bool
) -> None:
    number = transfer_pb2.Encoding.Value(f"ENCODING_{encoding.name}")
    first = scene.model(0)
    base_path = tmp_path / "base"
    base_path.write_bytes(scene.fake.files[first.blake3])
    target_path = tmp_path / "target"
    target_path.write_bytes(digits_model(tmp_path, 1))
    with open_tensors(base_path) as base, open_tensors(target_path) as target:
        encoded = encode(
            target.arrays,
            encoding,
            base=base.arrays if delta else None,
            generator=np.random.default_rng(0),
        )
        wire = write_tensors(
            tmp_path / "wire", encoded, layout=encoded_layout(base.layout, encoding)
        )
        with open_tensors(tmp_path / "wire") as file:
            update = EncodedUpdate(file, base.layout, encoding, base if delta else None)
            decoded = write_tensors(tmp_path / "decoded", update.decode_to_arrays())
    scene.fake.offer((tmp_path / "wire").read_bytes())
    second = transfer_pb2.ModelReference(
        blake3=decoded.blake3,
        size=decoded.size,
        renditions=[
            transfer_pb2.Rendition(
                blake3=wire.blake3,
                size=wire.size,
                encoding=number,
                base_blake3=first.blake3 if delta else "",
            )
        ],
    )
    async with scene.host():
        scene.fake.instruct(train_instruction("one", first))
        await scene.fake.completed("one")
        scene.fake.instruct(
            train_instruction("two", second, round_=2, encoding=number, delta=delta)
        )
        upload = await scene.fake.completed("two")
    assert upload.header.encoding == number
    assert upload.header.delta is delta
    (tmp_path / "update").write_bytes(upload.content)
    with open_tensors(tmp_path / "update") as file, open_tensors(tmp_path / "decoded") as model:
        trained = EncodedUpdate(file, model.layout, encoding, model if delta else None)
        moved = trained.decode_to_arrays()
        distance = max(
            float(np.abs(moved[name] - model.arrays[name]).max()) for name in model.arrays
        )
    assert 0 < distance < 1


async def test_host_without_the_base_downloads_the_full_model(scene: Scene) -> None:
    model = scene.model()
    whole = model.renditions.pop()
    model.renditions.append(
        transfer_pb2.Rendition(
            blake3="1" * 64, size=10, encoding=transfer_pb2.ENCODING_INT8, base_blake3="2" * 64
        )
    )
    model.renditions.append(whole)
    async with scene.host():
        scene.fake.instruct(train_instruction("a", model))
        await scene.fake.completed("a")
    assert scene.fake.fetches == [(model.blake3, 0)]
