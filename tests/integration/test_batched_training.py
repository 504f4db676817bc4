"""Hosts that train their clients in one batched step, killed in the middle of it.

All tests share the processes; every run has the same seed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
BATCHED = ("task.layered=true", "training.batched=true")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("batched")
    async with crash_federation(folder, clients=6, hosts=2, count=5, rounds=2) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(federation: Federation) -> str:
    """Return the digest of the final model of a run without faults."""
    return await federation.finished(await federation.start_run(*BATCHED))


def said(federation: Federation, what: str) -> int:
    """Return the number of times that `what` occurs in the hosts' logs."""
    return sum(federation.files.log(f"host-{n}").read_text().count(what) for n in range(2))


async def test_each_host_trains_its_clients_in_one_batched_step(
    federation: Federation, undisturbed: str
) -> None:
    assert said(federation, "trained in one batched step") >= 4
    steps = 0
    for _ in range(3):  # a host waits for a client's late instruction for only a second
        before = said(federation, "trained in one batched step")
        assert await federation.finished(await federation.start_run(*BATCHED)) == undisturbed
        steps = said(federation, "trained in one batched step") - before
        if steps == 4:
            break
    assert steps == 4


async def test_host_killed_before_its_first_update_gives_the_same_model(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.kill("train-client-1")
    run_id = await federation.start_run(*BATCHED)
    assert await federation.processes.hosts[0].ended() == 137
    await federation.processes.start_host(0)
    assert await federation.finished(run_id) == undisturbed


async def test_host_killed_between_its_updates_gives_the_same_model(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.hold("train-client-3")
    run_id = await federation.start_run(*BATCHED)
    await until(lambda: any("client-0" in path.name for path in federation.spooled()))
    await federation.kill_host(0)
    federation.points.release("train-client-3")
    await federation.processes.start_host(0)
    assert await federation.finished(run_id) == undisturbed


async def test_coordinator_killed_during_a_batched_step_gives_the_same_model(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.hold("train-client-4")
    run_id = await federation.start_run(*BATCHED)
    await until(lambda: federation.points.reached("train-client-4"))
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    federation.points.release("train-client-4")
    assert await federation.finished(run_id) == undisturbed


async def test_unsupported_network_is_trained_client_by_client(
    federation: Federation,
) -> None:
    alone = await federation.finished(await federation.start_run())
    assert await federation.finished(await federation.start_run("training.batched=true")) == alone
    assert (
        said(federation, "batched steps need an nn.Sequential, but the network is a _Network") == 2
    )
