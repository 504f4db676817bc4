"""A coordinator killed in any phase of a round resumes and ends with exactly the same model.

Hosts are never restarted. All tests share them: each starts a run of its own, always with the
same seed, so that each must end with the same model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.common.errors import RunError
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(tmp_path_factory.mktemp("faults")) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> list[operator_pb2.CommittedRound]:
    """Return the committed rounds of a run without faults."""
    run_id = await shared.start_run()
    await shared.finished(run_id)
    return await shared.history(run_id)


async def same_run(
    federation: Federation, run_id: str, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    """Wait for the end; check that it equals the undisturbed run and all hosts reconnect."""
    assert await federation.finished(run_id) == undisturbed[-1].model_blake3
    history = await federation.history(run_id)
    assert [entry.model_blake3 for entry in history] == [
        entry.model_blake3 for entry in undisturbed
    ]
    assert [[m.client_id for m in entry.members] for entry in history] == [
        [m.client_id for m in entry.members] for entry in undisturbed
    ]
    assert [entry.metrics for entry in history] == [entry.metrics for entry in undisturbed]
    assert {member.state for entry in history for member in entry.members} == {INCLUDED}
    assert not list(federation.state.glob("spool/*")), "the spool is not emptied"
    await federation.until_attending()


@pytest.mark.parametrize(
    "point",
    [
        "select",  # available clients are stored, the cohort is not
        "weigh",  # all updates are spooled
        "apply",  # updates are reduced, the model is not on disk
        "evaluate",  # the model is on disk
        "observe",  # the model is evaluated, and about to be committed
    ],
)
async def test_coordinator_killed_between_phases_gives_the_same_run(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound], point: str
) -> None:
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    await same_run(federation, run_id, undisturbed)
    history = await federation.history(run_id)
    assert [each.bytes_up for each in history] == [each.bytes_up for each in undisturbed]


async def test_coordinator_killed_while_the_cohort_trains_gives_the_same_run(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    trainings = [f"train-client-{number}" for number in range(6)]
    federation.points.hold(*trainings)
    run_id = await federation.start_run()
    cohort = [member.client_id for member in await federation.cohort(run_id)]
    await until(lambda: any(federation.points.reached(f"train-{each}") for each in cohort))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    await same_run(federation, run_id, undisturbed)


async def test_coordinator_killed_with_some_updates_received_gives_the_same_run(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    held = f"train-{undisturbed[0].members[0].client_id}"
    federation.points.hold(held)
    run_id = await federation.start_run()
    await until(lambda: bool(federation.spooled()) and federation.points.reached(held))
    before = federation.spooled()
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    await federation.until_attending()
    assert set(before) <= set(federation.spooled()), "updates that had arrived are lost"
    federation.points.release()
    await same_run(federation, run_id, undisturbed)


async def test_coordinator_killed_after_a_commit_gives_the_same_run(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    run_id = await federation.start_run()
    await federation.until_committed(run_id, 1)
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    await same_run(federation, run_id, undisturbed)


async def test_hosts_that_reconnect_before_their_run_resumes_wait_for_it(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    held = [f"train-{member.client_id}" for member in undisturbed[0].members]
    federation.points.hold(*held)
    run_id = await federation.start_run()
    await until(lambda: any(federation.points.reached(each) for each in held))
    await federation.kill_coordinator()
    federation.points.hold("init")
    federation.points.release(*held)
    await federation.restart_coordinator()
    await federation.until_attending()  # by now hosts have updates to deliver
    await until(lambda: federation.points.reached("init"))
    federation.points.release()
    await same_run(federation, run_id, undisturbed)


async def test_resumed_run_gives_the_same_run_as_an_uninterrupted_one(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    federation.points.hold("select", *(f"train-client-{number}" for number in range(6)))
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("select"))
    federation.points.release("select")  # it continues until the trainings
    stopped = await federation.operator.stop_run(run_id)
    federation.points.release()
    assert stopped.state == operator_pb2.RUN_STATE_STOPPED
    assert stopped.committed_rounds < stopped.rounds
    with pytest.raises(RunError, match="is not in progress"):
        await federation.operator.stop_run(run_id)
    resumed = await federation.operator.resume_run(run_id)
    assert (resumed.run_id, resumed.reason) == (run_id, "")
    with pytest.raises(RunError, match="only a stopped or failed run can be resumed"):
        await federation.operator.resume_run(run_id)
    await same_run(federation, run_id, undisturbed)
    with pytest.raises(RunError, match="is finished"):
        await federation.operator.resume_run(run_id)


async def test_run_that_failed_without_enough_clients_can_be_resumed(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    await federation.kill_host(2)
    await federation.until_attending(2)
    run_id = await federation.start_run("start_timeout_seconds=0.5")
    failed = await federation.ended(run_id)
    assert failed.state == operator_pb2.RUN_STATE_FAILED
    assert "4 of 6 clients were connected after 0.5 s; start more hosts" in failed.reason
    await federation.processes.start_host(2)
    await federation.until_attending()
    await federation.operator.resume_run(run_id)
    await same_run(federation, run_id, undisturbed)


async def test_concurrent_runs_share_clients_and_survive_a_kill(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    federation.points.hold("select")
    run_ids = await asyncio.gather(*(federation.start_run() for _ in range(4)))
    federation.points.kill("weigh")
    federation.points.release("select")
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    for run_id in run_ids:
        await federation.finished(run_id)
    for run_id in run_ids:
        await same_run(federation, run_id, undisturbed)


async def test_clients_evaluate_after_a_restart_of_the_coordinator(federation: Federation) -> None:
    runs = [await federation.start_run("task.central=false")]
    await federation.finished(runs[0])
    federation.points.hold("forward")
    runs.append(await federation.start_run("task.central=false", "rounds=1"))
    await until(lambda: federation.points.reached("forward"))
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    federation.points.release()
    await federation.finished(runs[1])
    undisturbed, disturbed = [await federation.history(run_id) for run_id in runs]
    assert disturbed[0].metrics == undisturbed[0].metrics
    assert disturbed[0].metrics.HasField("accuracy")
