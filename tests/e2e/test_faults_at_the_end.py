"""A coordinator killed between the last commit and the end of a run ends it with the same model."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS = 2
LAST_COMMIT = f"after-commit_round-{ROUNDS}"
PRETRAINED = [
    'selector.name="feddiverse"',
    f"profiles.triplet.pretraining_rounds={ROUNDS}",
    "profiles.triplet.bias_steps=1",
    "profiles.triplet.attribute_steps=1",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("end")
    async with crash_federation(folder, clients=4, hosts=2, count=2, rounds=ROUNDS) as federation:
        yield federation


async def ended_well(federation: Federation, run_id: str, digest: str) -> None:
    """Wait for the end; check the digest and the number of committed rounds."""
    assert await federation.finished(run_id) == digest
    assert [each.round for each in await federation.history(run_id)] == [*range(1, ROUNDS + 1)]
    assert not list(federation.state.glob("spool/*"))


def kept_updates(federation: Federation) -> list[Path]:
    return list(federation.files.folder.glob("host-*/updates/*.json"))


@pytest.mark.parametrize("point", [LAST_COMMIT, "before-set_run_state-2"])
async def test_coordinator_killed_at_the_last_commit_finishes_the_run_without_hosts(
    federation: Federation, point: str
) -> None:
    digest = await federation.finished(await federation.start_run())
    federation.points.note_boundaries()
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    for number in range(2):
        await federation.kill_host(number)
    await federation.restart_coordinator()
    await ended_well(federation, run_id, digest)  # this needs no host
    await federation.start_hosts()


async def test_coordinator_killed_after_pretraining_finishes_the_run(
    federation: Federation,
) -> None:
    digest = await federation.finished(await federation.start_run(*PRETRAINED))
    federation.points.note_boundaries()
    federation.points.kill(LAST_COMMIT)
    run_id = await federation.start_run(*PRETRAINED)
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    await ended_well(federation, run_id, digest)
    commits = [each for each in federation.points.boundaries if each.startswith("commit_round")]
    assert len(commits) == 2 * ROUNDS


async def test_run_that_failed_after_its_last_round_finishes_when_resumed(
    federation: Federation,
) -> None:
    """This is the state after a restart of a coordinator that can no longer read the run file."""
    digest = await federation.finished(await federation.start_run())
    federation.points.note_boundaries()
    federation.points.kill(LAST_COMMIT)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    with contextlib.closing(sqlite3.connect(federation.state / "potluck.sqlite3")) as database:
        database.execute("UPDATE runs SET state = 'failed' WHERE run_id = ?", [run_id])
        database.commit()
    await federation.restart_coordinator()
    assert (await federation.status(run_id)).state == operator_pb2.RUN_STATE_FAILED
    await federation.operator.resume_run(run_id)
    await ended_well(federation, run_id, digest)


async def test_hosts_delete_their_updates_after_the_restart_of_a_finished_run(
    federation: Federation,
) -> None:
    """Hosts keep delivered updates until a coordinator reports that it no longer needs them."""
    federation.points.note_boundaries()
    federation.points.hold(LAST_COMMIT)
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached(LAST_COMMIT))
    for number in range(2):
        await federation.kill_host(number)
    federation.points.release()
    await federation.finished(run_id)
    await federation.kill_coordinator()
    assert kept_updates(federation)
    await federation.restart_coordinator()
    await federation.start_hosts()
    await until(lambda: not kept_updates(federation), "hosts drop their updates")
