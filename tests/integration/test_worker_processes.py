"""A host that trains its clients in processes of their own, some of which are killed.

All tests share the federation; every run has the same seed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, set_values, until

from potluck.client.training.processes.worker_count import BYTES_PER_WORKER
from potluck.common.process.capacity import available_memory, available_processors
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
BATCHED = ("task.layered=true", "training.batched=true")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("workers")
    async with crash_federation(
        folder, clients=6, hosts=1, count=5, rounds=2, start_hosts=False
    ) as federation:
        for path in federation.files.hosts:
            set_values(path, {"workers": 2})
        await federation.start_hosts()
        yield federation


def workers(federation: Federation) -> list[int]:
    """Return the ids of the worker processes."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            name, state, parent, *_ = (
                (folder / "stat").read_text().partition("(")[2].replace(")", "").split()
            )
        except (OSError, ValueError):
            continue
        host = str(federation.processes.hosts[0].group)
        if (name, parent) == ("potluck-worker", host) and state != "Z":
            found.append(int(folder.name))
    return found


async def test_parallel_workers_give_bitwise_equal_models(federation: Federation) -> None:
    await until(lambda: len(workers(federation)) == 2)
    apart = await federation.finished(await federation.start_run())
    assert await federation.finished(await federation.start_run()) == apart
    log, models, steps = federation.files.log("host-0"), set[str](), list[int]()
    for _ in range(2):
        before = log.read_text().count("trained in one batched step")
        models.add(await federation.finished(await federation.start_run(*BATCHED)))
        steps.append(log.read_text().count("trained in one batched step") - before)
    assert len(models) == 1
    # Two workers in two rounds; more if the host waits in vain for a client's late instruction.
    assert min(steps) == 4


async def test_batched_steps_work_with_host_sums(federation: Federation) -> None:
    apart = await federation.finished(await federation.start_run(*BATCHED))
    summed = (*BATCHED, "host_sums.enabled=true")
    first = await federation.finished(await federation.start_run(*summed))
    assert await federation.finished(await federation.start_run(*summed)) == first != apart


async def test_killed_worker_is_replaced(federation: Federation) -> None:
    undisturbed = await federation.finished(await federation.start_run(*BATCHED))
    [first, second] = workers(federation)
    for worker in (first, second):
        os.kill(worker, signal.SIGKILL)
    await until(lambda: not set(workers(federation)) & {first, second})
    assert await federation.finished(await federation.start_run(*BATCHED)) == undisturbed


async def test_workers_killed_repeatedly_during_a_training_give_the_same_model(
    federation: Federation,
) -> None:
    undisturbed = await federation.finished(await federation.start_run())
    federation.points.hold("train-client-1")
    run_id = await federation.start_run()
    for _ in range(3):
        await until(lambda: federation.points.reached("train-client-1"))
        federation.points.hold("train-client-1")  # also clears the record that it was reached
        for worker in workers(federation):
            os.kill(worker, signal.SIGKILL)
    federation.points.release()
    assert await federation.finished(run_id) == undisturbed
    for entry in await federation.history(run_id):
        assert {member.state for member in entry.members} == {operator_pb2.MEMBER_STATE_INCLUDED}


async def test_training_that_kills_every_worker_fails_and_the_round_continues(
    federation: Federation,
) -> None:
    undisturbed = await federation.finished(await federation.start_run())
    federation.points.kill_always("train-client-1")
    run_id = await federation.start_run("rounds=1", "clients_per_round=6", "round.quorum=0.5")
    await federation.finished(run_id)
    [entry] = await federation.history(run_id)
    failed = operator_pb2.MEMBER_STATE_FAILED
    states = {member.client_id: member.state for member in entry.members}
    included = {f"client-{number}": operator_pb2.MEMBER_STATE_INCLUDED for number in range(6)}
    assert states == included | {"client-1": failed}
    said = federation.files.log("host-0").read_text()
    assert "was killed by signal 9, 5 times in a row" in said
    federation.points.clear()
    assert await federation.finished(await federation.start_run()) == undisturbed


async def test_workers_end_when_their_host_is_killed(federation: Federation) -> None:
    left = workers(federation)
    await federation.kill_host(0)
    await until(lambda: not any(Path("/proc", str(pid)).exists() for pid in left))


async def test_host_chooses_its_number_of_workers_if_set_to_auto(federation: Federation) -> None:
    """Start the host again, which the test above has killed."""
    for path in federation.files.hosts:
        set_values(path, {"workers": "auto"})
    before = most_workers()
    await federation.start_hosts()
    await federation.until_attending()
    least, most = sorted((before, most_workers()))  # other tests take and release memory meanwhile
    await until(lambda: least <= max(1, len(workers(federation))) <= most)
    await federation.finished(await federation.start_run(*BATCHED))


def most_workers() -> int:
    """Return the number of workers that the machine's processors and free memory allow now."""
    return max(1, min(available_processors(), available_memory() // BYTES_PER_WORKER, 6))
