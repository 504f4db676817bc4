"""Clients describe their models before they send them, and some skip the upload (fedentropy).

All tests share the processes: each starts a run with the same seed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, set_values, until

from potluck.client.config import load_config
from potluck.rpc.v1 import operator_pb2

INCLUDED, SPARED = operator_pb2.MEMBER_STATE_INCLUDED, operator_pb2.MEMBER_STATE_SPARED
pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("uploads"),
        clients=CLIENTS,
        count=5,
        rounds=3,
        assignments=[
            'selector.name="fedentropy"',
            "task.unequal=true",
            "training.learning_rate=1.0",
        ],
    ) as federation:
        yield federation


History = list[list[tuple[str, int, str]]]


async def parts(federation: Federation, run_id: str) -> History:
    """Return each round's members with their state, and the reasons for skipped uploads."""
    history = await federation.history(run_id)
    return [
        [
            (member.client_id, member.state, member.trouble if member.state == SPARED else "")
            for member in row.members
        ]
        for row in history
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> tuple[str, History]:
    """Return the final model's digest and the cohorts of a run without faults."""
    run_id = await shared.start_run()
    return await shared.finished(run_id), await parts(shared, run_id)


async def test_clients_upload_only_requested_updates(
    federation: Federation, undisturbed: tuple[str, History]
) -> None:
    run_id = await federation.start_run("task.parameters=100000")
    await federation.finished(run_id)
    size, spared = 4 * 100_000, 0
    for row in await federation.history(run_id):
        states = [member.state for member in row.members]
        assert set(states) == {INCLUDED, SPARED} or set(states) == {INCLUDED}
        assert states.count(INCLUDED) * size < row.bytes_up < (states.count(INCLUDED) + 1) * size
        spared += states.count(SPARED)
        for member in row.members:
            assert ("entropy" in member.trouble) == (member.state == SPARED)
    assert spared
    folder = federation.files.folder
    await until(lambda: not [*folder.glob("host-*/updates/*")], "hosts drop what is not wanted")


@pytest.mark.parametrize(
    "point",
    ["before-add_answers-1", "after-add_answers-1", "after-set_members-1", "weigh", "apply"],
)
async def test_killed_coordinator_requests_the_same_updates(
    federation: Federation, undisturbed: tuple[str, History], point: str
) -> None:
    federation.points.note_boundaries()
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    found = await federation.finished(run_id), await parts(federation, run_id)
    assert found == undisturbed


async def test_host_killed_before_its_updates_are_requested_still_sends_them(
    federation: Federation, undisturbed: tuple[str, History]
) -> None:
    federation.points.hold("train-client-5")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("train-client-5"))
    updates = federation.files.folder / "host-0" / "updates"
    await until(lambda: len([*updates.glob("*.json")]) == 2, "two clients have trained")
    await federation.kill_host(0)
    await federation.processes.start_host(0)
    federation.points.release()
    found = await federation.finished(run_id), await parts(federation, run_id)
    assert found == undisturbed


async def test_host_that_forbids_the_question_is_excluded(federation: Federation) -> None:
    path = federation.files.hosts[2]
    allowed = load_config(path, {}).disclosure.questions
    await federation.kill_host(2)
    await federation.until_attending(2)
    without = [kind for kind in allowed if kind != "soft-label"]
    set_values(path, {"disclosure": {"questions": without}})
    await federation.processes.start_host(2)
    await federation.until_attending()
    run_id = await federation.start_run()
    await federation.finished(run_id)
    members = {client for row in await parts(federation, run_id) for client, _, _ in row}
    assert members == {"client-0", "client-1", "client-2", "client-3"}
    await federation.kill_host(2)
    set_values(path, {"disclosure": {"questions": list(allowed)}})
    await federation.processes.start_host(2)
