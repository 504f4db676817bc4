"""Two processes of one host: a live one keeps its connection, a frozen one is replaced."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.federation import PATIENCE_SECONDS, Federation, crash_federation, set_values, until

from potluck.common.net.build_version import software_version
from potluck.deploy.local.demo_files import program
from potluck.deploy.local.processes import TetheredProcess, stop_all

pytestmark = pytest.mark.slow


@asynccontextmanager
async def federation_of_one(folder: Path) -> AsyncIterator[Federation]:
    async with crash_federation(
        folder,
        clients=2,
        hosts=1,
        count=2,
        rounds=1,
        assignments=["round.leavers=drop"],
        # Even on a busy machine, a live process sends something within three heartbeats.
        coordinator={"heartbeat_seconds": 2.0},
    ) as federation:
        await federation.until_attending()
        yield federation


@asynccontextmanager
async def second_process(federation: Federation) -> AsyncIterator[tuple[TetheredProcess, Path]]:
    """Run another process with the host's certificate, as if on another machine; yield its log
    too."""
    config = federation.files.folder / "second.toml"
    shutil.copy(federation.files.hosts[0], config)
    set_values(config, {"state_directory": str(federation.files.folder / "second")})
    log = federation.files.log("second")
    command = [program("potluck-client"), "--config", str(config)]
    process = await TetheredProcess.start("second", command, log=log)
    try:
        yield process, log
    finally:
        await stop_all([process])


async def last_seen(federation: Federation) -> datetime:
    clients = await federation.operator.list_clients()
    assert {each.software_version for each in clients if each.attending} <= {software_version()}
    return min(client.last_seen.ToDatetime(UTC) for client in clients)


async def seen_since(federation: Federation, time: datetime) -> datetime:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (seen := await last_seen(federation)) < time:  # noqa: ASYNC110  # by a process
            await asyncio.sleep(0.05)
    return seen


async def test_second_process_of_a_host_is_refused_with_one_line(tmp_path: Path) -> None:
    async with (
        federation_of_one(tmp_path) as federation,
        second_process(federation) as (
            second,
            log,
        ),
    ):
        assert await second.ended() == 1
        last = log.read_text().splitlines()[-1]
        assert last.startswith(
            "potluck-client: another process is connected as host 'host-0', from 127"
        )
        assert "stop one of the two" in last
        said = federation.files.log("coordinator").read_text()
        assert said.count("two processes with one certificate") == 1
        first = federation.files.log("host-0").read_text()
        assert first.count('"attending"') == 1
        await federation.finished(await federation.start_run())


async def test_frozen_process_of_a_host_is_replaced_and_ends_when_it_wakes(tmp_path: Path) -> None:
    async with federation_of_one(tmp_path) as federation:
        first = federation.processes.hosts[0]
        os.killpg(first.group, signal.SIGSTOP)  # it sends nothing on the open connection
        async with second_process(federation) as (_, log):
            await until(lambda: '"attending"' in log.read_text(), "the second attends")
            os.killpg(first.group, signal.SIGCONT)
            assert await first.ended() == 1
            said = federation.files.log("host-0").read_text()
            assert "another process is connected as host 'host-0'" in said.splitlines()[-1]
            await federation.finished(await federation.start_run())
            assert log.read_text().count('"attending"') == 1


async def test_last_seen_is_the_time_of_the_last_message_of_a_host(tmp_path: Path) -> None:
    async with federation_of_one(tmp_path) as federation:
        came = await last_seen(federation)
        while_there = await seen_since(federation, came + timedelta(seconds=1))
        await federation.kill_host(0)
        await federation.until_attending(0)
        left = await seen_since(federation, while_there)
        await federation.kill_coordinator()
        await federation.restart_coordinator()
        assert await last_seen(federation) == left
