"""Models and updates pass through an object store, while the store or hosts are killed.

The store is a real S3 server that loses its objects when it is killed. Files may not be sent
directly, except in tests that allow it. Every run must end with the model of a run without a store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest
import pytest_asyncio
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, set_values, until
from support.s3_server import ENVIRONMENT, SECRET, S3Server, s3_server

from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def straight(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digests of the models of a run without an object store, by round."""
    async with crash_federation(tmp_path_factory.mktemp("straight"), rounds=2) as federation:
        run_id = await federation.start_run()
        await federation.finished(run_id)
        return [entry.model_blake3 for entry in await federation.history(run_id)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        async with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(
    straight: list[str], server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("stored"),
        rounds=2,
        coordinator={"files": server.files()},
        start_hosts=False,
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"object_stores": [server.origin], "cached_models": 1})
        await federation.start_hosts()
        await federation.until_attending()
        yield federation


async def same_models(federation: Federation, run_id: str, straight: list[str]) -> None:
    """Wait for a run's end; assert that its models equal those of a run without a store.

    No round is lost, no client is excluded, and no model is sent directly.
    """
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert [entry.model_blake3 for entry in history] == straight
    assert {member.state for entry in history for member in entry.members} == {INCLUDED}
    assert [entry.bytes_down for entry in history] == [0, 0]
    assert all(entry.bytes_up for entry in history)


async def until_blamed(federation: Federation, key: str) -> None:
    """Wait until the coordinator logs that the store sends other bytes of an object."""
    text = f"returned different bytes than were stored, for object {key}"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            described = await federation.operator.describe_coordinator()
            if text in described.object_store_trouble:
                return


async def test_models_and_updates_are_sent_through_the_object_store(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    run_id = await federation.start_run()
    await same_models(federation, run_id, straight)
    fetched = server.requests("GET", "models")
    assert f"{straight[0]}.safetensors" in fetched
    assert len(server.requests("PUT", "models")) == 2, "each round's model is put once"
    assert len(server.requests("PUT", "updates")) == 8, "two rounds of four clients"
    await until(lambda: not server.names("updates"), "updates that were taken are deleted")
    said = "".join(path.read_text() for path in federation.files.folder.rglob("*.log"))
    assert "attending" in said
    assert SECRET not in said
    assert "X-Amz-Signature" not in said
    kept = [path for path in federation.state.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in kept)


async def test_object_store_killed_during_training_gives_the_same_models(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    trainings = [f"train-client-{number}" for number in range(6)]
    federation.points.hold(*trainings)
    run_id = await federation.start_run()
    cohort = [member.client_id for member in await federation.cohort(run_id)]
    await until(lambda: any(federation.points.reached(f"train-{each}") for each in cohort))
    server.kill()
    federation.points.release()
    logs = [federation.files.log(path.stem) for path in federation.files.hosts]
    await until(
        lambda: any("upload interrupted" in path.read_text() for path in logs), "hosts say so"
    )
    described = await federation.operator.describe_coordinator()
    assert "failed" in described.object_store_trouble
    await server.start()  # its objects are lost
    await same_models(federation, run_id, straight)
    assert f"{straight[0]}.safetensors" in server.names("models"), "it is uploaded again"
    described = await federation.operator.describe_coordinator()
    assert described.object_store_trouble == ""


async def test_object_store_that_sends_wrong_models_is_reported_until_it_recovers(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    logs = [federation.files.log(path.stem) for path in federation.files.hosts]
    federation.points.hold("weigh")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("weigh"))
    server.lie()  # it now changes the model and the updates of round 2
    federation.points.release()
    await until(
        lambda: any(
            "object store returned different bytes than were stored" in path.read_text()
            for path in logs
        ),
        "hosts blame the store",
    )
    await until_blamed(federation, "models/")
    assert (
        "object store returned different bytes than were stored"
        in federation.files.log("coordinator").read_text()
    )
    server.tell_the_truth()
    await same_models(federation, run_id, straight)
    described = await federation.operator.describe_coordinator()
    assert described.object_store_trouble == ""


async def test_object_store_that_sends_wrong_updates_is_reported_until_it_recovers(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    trainings = [f"train-client-{number}" for number in range(6)]
    federation.points.hold(*trainings)
    run_id = await federation.start_run()
    cohort = [member.client_id for member in await federation.cohort(run_id)]
    await until(lambda: any(federation.points.reached(f"train-{each}") for each in cohort))
    server.lie()
    federation.points.release()
    log = federation.files.log("coordinator")
    await until(lambda: "DIGEST_MISMATCH" in log.read_text(), "an update is refused")
    await until_blamed(federation, "")
    server.tell_the_truth()
    await same_models(federation, run_id, straight)


async def test_host_killed_with_its_update_in_the_store_gives_the_same_models(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    put = len(server.requests("PUT", "updates"))
    federation.points.hold("weigh")
    run_id = await federation.start_run()
    await until(lambda: len(server.requests("PUT", "updates")) > put, "an update is put")
    await federation.kill_host(0)
    await federation.processes.start_host(0)
    federation.points.release()
    await same_models(federation, run_id, straight)


async def test_coordinator_killed_with_updates_in_the_store_gives_the_same_models(
    federation: Federation, server: S3Server, straight: list[str]
) -> None:
    put = len(server.requests("PUT", "updates"))
    run_id = await federation.start_run()
    await until(lambda: len(server.requests("PUT", "updates")) > put, "an update is put")
    await federation.kill_coordinator()
    server.put("models", f"{'0' * 64}.safetensors", b"of a round long gone")
    await federation.restart_coordinator()
    await same_models(federation, run_id, straight)
    await until(
        lambda: f"{'0' * 64}.safetensors" not in server.names("models"), "the store is swept"
    )


async def test_files_are_sent_directly_if_the_store_is_down_and_fallback_is_allowed(
    federation: Federation, server: S3Server, straight: list[str], tmp_path: Path
) -> None:
    await federation.kill_coordinator()
    set_values(federation.files.coordinator, {"files": server.files(fallback=True)})
    await federation.restart_coordinator()
    await federation.until_attending()
    server.kill()
    run_id = await federation.start_run()
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert [entry.model_blake3 for entry in history] == straight
    assert all(entry.bytes_down for entry in history)
