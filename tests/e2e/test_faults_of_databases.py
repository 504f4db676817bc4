"""A restart of PostgreSQL during a run delays the run and changes nothing else."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
import pytest_asyncio
from support.boundaries import command_points, killed_command, refuses_to_serve
from support.federation import SERVER_COMMAND, Federation, crash_federation, until
from support.postgresql import MISSING, PostgreSQL, programs, running_postgresql

from potluck.deploy.local.demo_files import reserved_port
from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Shared:
    federation: Federation
    server: PostgreSQL
    metrics_port: int

    async def ready(self) -> int:
        """Return the HTTP status of /readyz."""

        def ask() -> int:
            try:
                with urlopen(f"http://127.0.0.1:{self.metrics_port}/readyz", timeout=60) as answer:
                    return int(answer.status)
            except HTTPError as error:
                return error.code
            except (TimeoutError, URLError):  # the coordinator or this machine is busy
                return 0

        return await asyncio.to_thread(ask)

    async def until_ready(self, status: int) -> None:
        async with asyncio.timeout(240):
            while await self.ready() != status:  # noqa: ASYNC110  # a process gives no signal
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    if programs() is None:
        pytest.skip(MISSING)
    with running_postgresql() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    server: PostgreSQL, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Shared]:
    with reserved_port() as port:
        settings = {"database": server.new_schema(), "metrics_address": f"127.0.0.1:{port}"}
        folder = tmp_path_factory.mktemp("databases")
        async with crash_federation(
            folder, coordinator=settings, witnessed=SERVER_COMMAND
        ) as federation:
            yield Shared(federation, server, port)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Shared) -> str:
    """Return the digest of the final model of a run without faults."""
    return await shared.federation.finished(await shared.federation.start_run())


@pytest.mark.parametrize("mode", ["fast", "immediate"])
@pytest.mark.parametrize(
    "point",
    [
        "select",  # available clients are stored, the cohort is not
        "weigh",  # all updates are spooled
        "observe",  # the round is about to be committed
    ],
)
async def test_database_server_restarted_during_a_round_gives_the_same_run(
    shared: Shared, undisturbed: str, mode: str, point: str
) -> None:
    federation = shared.federation
    process = federation.coordinator.group
    federation.points.clear()
    federation.points.hold(point)
    await shared.until_ready(200)
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached(point))
    shared.server.stop(mode)
    federation.points.release()
    await shared.until_ready(503)
    shared.server.start()
    await shared.until_ready(200)
    assert await federation.finished(run_id) == undisturbed
    assert federation.coordinator.group == process
    assert len(await federation.attending_hosts()) == len(federation.files.hosts)


async def test_update_received_before_the_deadline_counts_if_it_is_stored_later(
    shared: Shared, undisturbed: str
) -> None:
    federation = shared.federation
    federation.points.clear()
    federation.points.hold("train-client-0")
    seconds = 10.0
    run_id = await federation.start_run(f"round.deadline_seconds={seconds}")
    await until(lambda: federation.points.reached("train-client-0"))
    told = time.monotonic()
    shared.server.stop()
    federation.points.release()
    await shared.until_ready(503)
    await until(lambda: time.monotonic() > told + seconds + 1)
    shared.server.start()
    assert await federation.finished(run_id) == undisturbed
    history = await federation.history(run_id)
    states = {member.state for each in history for member in each.members}
    assert states == {operator_pb2.MEMBER_STATE_INCLUDED}
    chosen = [
        line
        for line in federation.files.log("coordinator").read_text().splitlines()
        if run_id in line and "selected" in line
    ]
    assert len(chosen) == len(history)  # no cohort was selected twice


async def test_coordinator_can_be_stopped_while_it_waits_for_its_database(
    shared: Shared, undisturbed: str
) -> None:
    federation = shared.federation
    federation.points.clear()
    federation.points.hold("weigh")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("weigh"))
    shared.server.stop()
    federation.points.release()
    await shared.until_ready(503)
    await federation.coordinator.stop()
    assert await federation.coordinator.ended() == 0
    shared.server.start()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed


async def test_run_finishes_after_a_restore_killed_at_any_write(
    shared: Shared, undisturbed: str, tmp_path: Path
) -> None:
    federation, backup = shared.federation, tmp_path / "backup"
    federation.points.clear()
    run_id = await federation.before_round_two()
    code, output = await federation.server_command("backup", str(backup))
    assert code == 0, output
    federation.points.clear()
    await federation.until_committed(run_id, 2)
    await federation.kill_coordinator()
    crashed = tmp_path / "crashed"
    shutil.copytree(federation.state, crashed)
    interrupted = []
    for point in await command_points(federation, "restore", backup):
        shutil.rmtree(federation.state)
        shutil.copytree(crashed, federation.state)
        await killed_command(federation, point, "restore", backup)
        if (federation.state / "restoring").exists():
            interrupted.append(point)
    assert interrupted
    shutil.rmtree(federation.state)
    shutil.copytree(crashed, federation.state)
    await killed_command(federation, interrupted[0], "restore", backup)
    await refuses_to_serve(federation, backup)
    code, output = await federation.server_command("restore", str(backup))
    assert code == 0, output
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed
    assert [each.round for each in await federation.history(run_id)] == [1, 2, 3]
