"""Hosts that permanently can't take part in a run are excluded, and the run continues.

There are three hosts with two clients each; each test starts the third host in its own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from support.federation import (
    PATIENCE_SECONDS,
    Federation,
    crash_federation,
    set_values,
    until,
)

from potluck.common.errors import ConfigurationError
from potluck.deploy.local.demo_files import program
from potluck.deploy.local.processes import TetheredProcess, stop_all
from potluck.rpc.v1 import operator_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ODD = 2
"""Number of the host that differs from the others."""
ALL_NEEDED = (
    "clients_per_round=4",
    "rounds=2",
    "round.quorum=1.0",
    "round.attempts=1",
    "expected_clients=6",
)
"""Settings with which the run fails at once if an attempt counts that failed because of a permanent
error."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("left-out")
    async with crash_federation(folder, clients=6, hosts=3, start_hosts=False) as federation:
        for number in (0, 1):
            await federation.processes.start_host(number)
        await federation.until_attending(2)
        yield federation


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def odd_host(federation: Federation, **values: str) -> AsyncIterator[TetheredProcess]:
    """Run the third host in another environment."""
    path = federation.files.hosts[ODD]
    command = [program("potluck-client"), "--config", str(path)]
    with environment(**values):
        process = await TetheredProcess.start("odd", command, log=federation.files.log("odd"))
    try:
        await federation.until_attending(3)
        yield process
    finally:
        await stop_all([process])
        await federation.until_attending(2)


async def told(federation: Federation, run_id: str) -> list[str]:
    """Return all notices of a run until it ends."""
    return [
        event.notice.text
        async for event in federation.operator.watch_run(run_id)
        if event.WhichOneof("event") == "notice"
    ]


async def check_left_out(federation: Federation, run_id: str, why: str) -> None:
    """Check that the run finished with the other hosts and reported the exclusion once."""
    notices = await told(federation, run_id)
    await federation.finished(run_id)
    said = [text for text in notices if "excluded" in text and why in text]
    assert len(said) == 1, notices
    assert "2 clients excluded: " in said[0]
    assert "(client-4, client-5)" in said[0]
    for committed in await federation.history(run_id):
        assert {member.host_id for member in committed.members} == {"host-0", "host-1"}


async def test_a_host_without_the_task_is_never_selected(federation: Federation) -> None:
    async with odd_host(federation, PYTHONPATH=""):
        run_id = await federation.start_run(*ALL_NEEDED)
        await check_left_out(federation, run_id, "task 'crash' is not installed on the host")


async def test_fixed_host_takes_part_again(federation: Federation) -> None:
    federation.points.hold("evaluate")
    async with odd_host(federation, PYTHONPATH=""):
        run_id = await federation.start_run("clients_per_round=4", "rounds=3", "expected_clients=6")
        await until(lambda: federation.points.reached("evaluate"))
        status = await federation.status(run_id)
        assert status.left_out.startswith("2 clients excluded: task 'crash' is not installed")
        clients = {each.client_id: each for each in await federation.operator.list_clients()}
        assert set(clients["client-4"].left_out) == {run_id}
        assert not clients["client-0"].left_out
    async with odd_host(federation):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await federation.status(run_id)).left_out:  # noqa: ASYNC110  # another process does
                await asyncio.sleep(0.02)
        federation.points.release()
        await federation.finished(run_id)
    first, *later = await federation.history(run_id)
    assert {member.host_id for member in first.members} == {"host-0", "host-1"}
    assert "host-2" in {member.host_id for each in later for member in each.members}


async def test_excluded_host_stays_excluded_after_a_kill_of_the_coordinator(
    federation: Federation,
) -> None:
    federation.points.hold("evaluate")
    async with odd_host(federation, POTLUCK_EXTRA_PARAMETERS="7"):
        run_id = await federation.start_run(*ALL_NEEDED)
        await until(lambda: federation.points.reached("evaluate"))
        left_out = (await federation.status(run_id)).left_out
        assert left_out.startswith("2 clients excluded: ")
        await federation.kill_coordinator()
        federation.points.release()
        await federation.restart_coordinator()
        await federation.finished(run_id)
    for committed in await federation.history(run_id):
        assert {member.host_id for member in committed.members} == {"host-0", "host-1"}


async def test_host_with_another_model_layout_is_excluded(federation: Federation) -> None:
    async with odd_host(federation, POTLUCK_EXTRA_PARAMETERS="7"):
        run_id = await federation.start_run(*ALL_NEEDED)
        await check_left_out(federation, run_id, "ballast")


async def test_host_whose_policy_refuses_the_run_is_excluded(federation: Federation) -> None:
    path = federation.files.hosts[ODD]
    before = path.read_text()
    set_values(path, {"disclosure": {"weighting": "equal"}})
    try:
        async with odd_host(federation):
            run_id = await federation.start_run(*ALL_NEEDED)
            await check_left_out(federation, run_id, "DISCLOSURE_REFUSED")
    finally:
        path.write_text(before)


async def test_too_few_remaining_clients_fail_the_run_and_it_can_be_resumed(
    federation: Federation,
) -> None:
    async with odd_host(federation, PYTHONPATH=""):
        run_id = await federation.start_run(
            "clients_per_round=6", "rounds=1", "round.quorum=1.0", "expected_clients=6"
        )
        status = await federation.ended(run_id)
        assert status.state == operator_pb2.RUN_STATE_FAILED
        assert status.reason.startswith(
            "4 of 6 clients can take part, but at least 6 are needed; 2 clients excluded: "
            "task 'crash' is "
        )
        assert status.reason.count("not installed") == 1
    async with odd_host(federation):
        await federation.operator.resume_run(run_id)
        await federation.finished(run_id)


async def test_settings_that_the_coordinator_can_check_are_refused_at_once(
    federation: Federation,
) -> None:
    before = len(await federation.operator.list_runs())
    with pytest.raises(ConfigurationError, match="the coordinator has no data directory"):
        await federation.start_run('initial_model="none.safetensors"')
    with pytest.raises(
        ConfigurationError, match="'expected_clients' is 6, but task 'digits' has data for 5"
    ):
        await federation.start_run("task.name=digits", "task.clients=5", "expected_clients=6")
    assert len(await federation.operator.list_runs()) == before
