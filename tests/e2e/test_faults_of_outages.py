"""An outage of all hosts, longer than a run waits at its start, delays the run and changes nothing.

All tests share the processes; every run has the same seed, and one attempt for each round.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, until

from potluck.common.errors import RunError
from potluck.deploy.local.demo import follow_processes
from potluck.deploy.view.watch import JsonDisplay
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED

CLIENTS = 5
PATIENCE = ["start_timeout_seconds=2.0", "round.attempts=1"]
EVERYBODY = ["round.grace_seconds=0.2", "round.quorum=1.0"]
MASKED = [*EVERYBODY, "secure_aggregation=true"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("outages"),
        clients=CLIENTS,
        hosts=CLIENTS,
        count=CLIENTS,
        rounds=2,
        assignments=PATIENCE,
        root=True,
    ) as federation:
        yield federation


async def until_waiting(federation: Federation, run_id: str, words: str) -> None:
    """Wait until a run reports that it waits."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        events = federation.operator.watch_run(run_id)
        async for event in events:
            if words in event.notice.text:
                await events.aclose()
                return
    raise AssertionError(f"the run ended without a word of '{words}'")


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (EVERYBODY, f"0 of at least {CLIENTS} clients are connected; waiting for {CLIENTS} more"),
        (
            MASKED,
            "0 clients on 0 hosts are connected, and a secure sum needs at least 5 clients on at",
        ),
    ],
    ids=["open", "masked"],
)
async def test_run_waits_for_all_hosts_killed_during_a_round(
    federation: Federation, assignments: list[str], words: str
) -> None:
    undisturbed = await federation.finished(await federation.start_run(*assignments))
    held = f"train-client-{CLIENTS - 1}"
    federation.points.hold(held)
    run_id = await federation.start_run(*assignments)
    await until(lambda: len(federation.spooled()) >= 2 and federation.points.reached(held))
    # Kill all at once: a run that waits while some are connected says so, and says nothing later.
    await asyncio.gather(*map(federation.kill_host, range(CLIENTS)))
    federation.points.release()
    await until_waiting(federation, run_id, words)
    await asyncio.sleep(2.5)  # longer than a run waits at its start
    status = await federation.status(run_id)
    assert status.state == operator_pb2.RUN_STATE_RUNNING
    assert status.waiting.what.startswith(words.partition(";")[0])
    assert (status.waiting.away_count, status.waiting.HasField("until")) == (CLIENTS, False)
    await federation.start_hosts()
    assert await federation.finished(run_id) == undisturbed
    for entry in await federation.history(run_id):
        assert {member.state for member in entry.members} == {INCLUDED}


async def test_demo_ends_with_an_error_when_its_last_host_is_killed(tmp_path: Path) -> None:
    """The demo does not restart hosts."""
    output = io.StringIO()
    async with crash_federation(tmp_path, clients=2, hosts=2, count=2) as federation:
        federation.points.hold("train-client-0")
        run_id = await federation.start_run()
        demo = asyncio.create_task(
            follow_processes(federation.operator, run_id, JsonDisplay(output), federation.processes)
        )
        await until(lambda: '"phase": "train"' in output.getvalue())
        for number in range(2):
            assert not demo.done()
            await federation.kill_host(number)
        with pytest.raises(RunError, match=r"host-\d ended"):
            await demo


async def test_run_reports_until_when_it_waits_for_clients(federation: Federation) -> None:
    begun = datetime.now(UTC)
    run_id = await federation.start_run(
        f"expected_clients={CLIENTS + 1}", "start_timeout_seconds=60"
    )
    while not (waiting := (await federation.status(run_id)).waiting).what:
        pass
    assert waiting.what == f"{CLIENTS} of {CLIENTS + 1} clients are connected; waiting for 1 more"
    until = waiting.until.ToDatetime(tzinfo=UTC)
    assert begun < until - timedelta(seconds=60) < datetime.now(UTC)
    await federation.operator.stop_run(run_id)


@pytest.mark.slow
async def test_run_waits_for_all_hosts_frozen_during_a_round(federation: Federation) -> None:
    """Use a run's default settings, except that there is only one attempt."""
    undisturbed = await federation.finished(await federation.start_run("round.grace_seconds=5"))
    held = [f"train-client-{number}" for number in range(CLIENTS)]
    federation.points.hold(*held)
    run_id = await federation.start_run("round.grace_seconds=5")
    await until(lambda: all(map(federation.points.reached, held)))
    groups = [process.group for process in federation.processes.hosts.values()]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        await federation.until_attending(0)
        await until_waiting(federation, run_id, "clients are connected; waiting for")
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)
    federation.points.release()
    assert await federation.finished(run_id) == undisturbed
