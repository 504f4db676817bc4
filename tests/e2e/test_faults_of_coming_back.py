"""A restarted coordinator asks hosts for work that they have dropped meanwhile.

Hosts are never restarted. Each run must end with the model of an undisturbed one without waiting
for a deadline: a round's deadline is ten minutes by default, longer than these tests wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import mounts
from support.federation import Federation, crash_federation, until
from support.postgresql import MISSING, programs, running_postgresql

from potluck.common.errors import PotluckError
from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED


def federation_of(folder: Path, **coordinator: Any) -> Any:
    return crash_federation(
        folder, clients=4, hosts=2, count=4, rounds=3, coordinator=dict(coordinator)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with federation_of(tmp_path_factory.mktemp("coming-back")) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> str:
    """Return the digest of the final model of a run without faults."""
    run_id = await shared.start_run()
    return await shared.finished(run_id)


async def as_undisturbed(federation: Federation, run_id: str, undisturbed: str) -> None:
    assert await federation.finished(run_id) == undisturbed
    history = await federation.history(run_id)
    assert {member.state for entry in history for member in entry.members} == {INCLUDED}
    assert "is late" not in federation.files.log("coordinator").read_text()


async def in_round_two(federation: Federation, *assignments: str) -> str:
    """Start a run; return its id when only client-0 still trains in round 2."""
    run_id = await federation.before_round_two(*assignments)
    federation.points.hold("train-client-0")
    federation.points.release("select")
    await until(lambda: federation.points.reached("train-client-0"))
    await until(lambda: len(list(federation.state.glob("spool/*/2.*/*.safetensors"))) == 3)
    return run_id


async def test_coordinator_killed_while_it_stops_a_run_gives_the_same_run(
    federation: Federation, undisturbed: str
) -> None:
    run_id = await in_round_two(federation)
    with end_cannot_be_stored(federation):
        stopping = asyncio.create_task(federation.operator.stop_run(run_id))
        await until(lambda: not (federation.state / "spool" / run_id).exists())
        await federation.kill_coordinator()
    with contextlib.suppress(PotluckError):
        await stopping
    federation.points.release()
    await federation.restart_coordinator()
    await as_undisturbed(federation, run_id, undisturbed)


@contextlib.contextmanager
def end_cannot_be_stored(federation: Federation) -> Iterator[None]:
    """Make the database refuse to mark attempts as abandoned, as if it could not be reached."""
    trigger = (
        "CREATE TRIGGER stays BEFORE UPDATE ON attempts WHEN NEW.state = 'abandoned' "
        "BEGIN SELECT RAISE(ABORT, 'not now'); END"
    )
    execute(federation, trigger)
    yield
    execute(federation, "DROP TRIGGER stays")


def execute(federation: Federation, statement: str) -> None:
    path = federation.state / "potluck.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


async def test_backup_restored_while_hosts_keep_running_gives_the_same_run(
    federation: Federation, undisturbed: str, tmp_path: Path
) -> None:
    run_id = await in_round_two(federation)
    await federation.kill_coordinator()
    shutil.copytree(federation.state, tmp_path / "backup")
    await federation.restart_coordinator()
    federation.points.release()
    assert await federation.finished(run_id) == undisturbed
    await federation.kill_coordinator()
    shutil.rmtree(federation.state)
    shutil.copytree(tmp_path / "backup", federation.state)
    await federation.restart_coordinator()
    await as_undisturbed(federation, run_id, undisturbed)


async def test_coordinator_down_for_longer_than_the_deadline_gives_the_same_run(
    federation: Federation,
) -> None:
    short = "round.deadline_seconds=12"
    undisturbed = await federation.finished(await federation.start_run(short))
    run_id = await in_round_two(federation, short)
    await federation.kill_coordinator()
    log = federation.files.log("host-0")
    await until(lambda: "its deadline has passed" in log.read_text())
    federation.points.release()
    await federation.restart_coordinator()
    await as_undisturbed(federation, run_id, undisturbed)


@pytest.mark.skipif(
    bool(mounts.why_no_failing_disk()), reason=mounts.why_no_failing_disk() or "can mount"
)
async def test_disk_that_turns_read_only_gives_the_same_run_after_its_repair(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    with mounts.failing_disk(state, megabytes=64) as disk:
        async with federation_of(tmp_path, state_directory=str(state)) as federation:
            undisturbed = await federation.finished(await federation.start_run())
            run_id = await in_round_two(federation)
            disk.turn_read_only()
            federation.points.release()
            assert await federation.coordinator.ended() == 1
            disk.mend()
            await federation.restart_coordinator()
            await as_undisturbed(federation, run_id, undisturbed)


@pytest.mark.skipif(programs() is None, reason=MISSING)
async def test_restart_of_the_database_server_gives_the_same_run(tmp_path: Path) -> None:
    with running_postgresql() as server:
        async with federation_of(tmp_path, database=server.new_schema()) as federation:
            undisturbed = await federation.finished(await federation.start_run())
            run_id = await in_round_two(federation)
            server.stop()
            federation.points.release()
            await until(lambda: len(federation.spooled()) != 3)  # the attempt's end can't be stored
            await federation.kill_coordinator()
            server.start()
            await federation.restart_coordinator()
            await as_undisturbed(federation, run_id, undisturbed)
