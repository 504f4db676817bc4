"""Late updates through a relay or an object store that is killed meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest
from support.federation import Federation, crash_federation, set_values, until
from support.late_updates import run_with_late_ones
from support.relays import relays_of
from support.s3_server import ENVIRONMENT, s3_server

pytestmark = pytest.mark.slow

JOINED = [("client-4", 1), ("client-5", 1)]
DEADLINE_SECONDS = 10.0


async def joined(
    federation: Federation, meanwhile: Callable[[], Awaitable[None]], *, seconds: float = 0.0
) -> str:
    """Finish a run whose late updates join round 2; return the digest of its model.

    seconds: duration of a start of the killed program; on a busy machine, rounds must be longer.
    """
    deadline = max(DEADLINE_SECONDS, 5 * seconds)
    run_id = await run_with_late_ones(federation, meanwhile, deadline_seconds=deadline)
    digest = await federation.finished(run_id)
    history = await federation.history(run_id)
    late = [[(each.client_id, each.round) for each in entry.late] for entry in history]
    assert late == [[], JOINED, []]
    return digest


async def hosts_anew(federation: Federation) -> None:
    """Restart the hosts with their current configuration."""
    for host in list(federation.processes.hosts.values()):
        await host.stop()
    # Delete cached models, which hosts would not fetch again.
    for path in federation.files.folder.glob("host-*/models/*"):
        path.unlink()
    await federation.start_hosts()
    await federation.until_attending()


async def test_late_updates_join_through_relays_and_object_stores(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, ENVIRONMENT):
        async with crash_federation(
            tmp_path, count=6, assignments=['strategy.name="fedavg"', 'selector.name="uniform"']
        ) as federation:
            await federation.until_attending()
            straight = await joined(federation, nothing)
            await through_a_relay(federation, straight)
            await through_a_store(federation, straight, tmp_path)


async def nothing() -> None:
    """Kill no process."""


async def through_a_relay(federation: Federation, straight: str) -> None:
    begun = time.monotonic()
    async with relays_of(federation, {"gate": range(3)}) as relays:
        relay, seconds = relays["gate"], time.monotonic() - begun
        await hosts_anew(federation)

        async def kill_relay() -> None:
            await relay.kill()
            await relay.start()  # the new process has not seen the late clients' instructions
            await until(lambda: relay.events().count("host connected") == 3, "hosts attend")

        def delivered() -> bool:
            count = relay.metric("potluck_relay_deliveries_total", outcome="delivered")
            return count == 2 + 4 + 6

        assert await joined(federation, kill_relay, seconds=seconds) == straight
        await until(delivered, "the late updates and those of two rounds are delivered")


async def through_a_store(federation: Federation, straight: str, folder: Path) -> None:
    begun = time.monotonic()
    async with s3_server(folder) as server:
        seconds = time.monotonic() - begun
        await federation.kill_coordinator()
        set_values(federation.files.coordinator, {"files": server.files()})
        for path in federation.files.hosts:
            set_values(path, {"object_stores": [server.origin]})
        await federation.restart_coordinator()
        await hosts_anew(federation)

        async def kill_store() -> None:
            server.kill()
            await server.start()  # its objects are lost

        assert await joined(federation, kill_store, seconds=seconds) == straight
        assert len(server.requests("PUT", "updates")) >= 4 + 2 + 4 + 6
