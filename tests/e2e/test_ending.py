"""A process that receives a signal ends within seconds during any work, and loses nothing.

The work that is interrupted waits for the test, so it would not end without the signal.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until
from support.promises import in_time

from potluck.deploy.local.processes import LocalProcess
from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SECONDS = 5.0
"""Maximum number of seconds in which a process must end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("ending")
    async with crash_federation(folder, clients=2, hosts=2, count=2, rounds=2) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> str:
    """Return the digest of the final model of a run without faults."""
    return await shared.finished(await shared.start_run())


async def ended_by(process: LocalProcess, number: signal.Signals) -> int:
    """Send a signal to a process and return its exit code."""
    os.kill(process.group, number)
    return await in_time(SECONDS, process.ended())


@pytest.mark.parametrize(
    ("point", "number", "code"),
    [
        ("select", signal.SIGTERM, 0),  # the plug-in blocks a thread
        ("weigh", signal.SIGINT, 130),
        ("evaluate", signal.SIGTERM, 0),
        ("observe", signal.SIGTERM, 0),  # the plug-in blocks the event loop
    ],
)
async def test_coordinator_ends_on_a_signal_during_a_plugin_call(
    federation: Federation, undisturbed: str, point: str, number: signal.Signals, code: int
) -> None:
    federation.points.hold(point)
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached(point))
    assert await ended_by(federation.coordinator, number) == code
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed


async def test_coordinator_ends_on_sigterm_while_its_database_is_locked(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.hold("select")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("select"))
    [path] = federation.state.glob("potluck.sqlite3")
    with locked(path):
        federation.points.release()  # the coordinator now tries to store the cohort
        assert await ended_by(federation.coordinator, signal.SIGTERM) == 0
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed


async def test_host_ends_on_sigterm_during_a_training_step(
    federation: Federation, undisturbed: str
) -> None:
    federation.points.hold("train-client-0", "train-client-1")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("train-client-0"))
    assert await ended_by(federation.processes.hosts[0], signal.SIGTERM) == 0
    federation.points.release()
    await federation.processes.start_host(0)
    assert await federation.finished(run_id) == undisturbed


async def test_coordinator_ends_on_sigterm_during_aggregation_of_a_large_model(
    federation: Federation,
) -> None:
    large = "task.parameters=10_000_000"
    wanted = await federation.finished(await federation.start_run(large))
    federation.points.hold("weigh", "evaluate")
    run_id = await federation.start_run(large)
    await until(lambda: federation.points.reached("weigh"))
    federation.points.release("weigh")
    assert await ended_by(federation.coordinator, signal.SIGTERM) == 0
    federation.points.release()
    await federation.restart_coordinator()
    status = await federation.status(run_id)
    assert status.state != operator_pb2.RUN_STATE_FINISHED
    assert await federation.finished(run_id) == wanted


class locked:  # noqa: N801  # it is used as a context manager
    """Lock a SQLite database from another process."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> None:
        self._connection.execute("BEGIN EXCLUSIVE")

    def __exit__(self, *_: object) -> None:
        self._connection.rollback()
        self._connection.close()
