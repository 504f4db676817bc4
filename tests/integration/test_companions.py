"""Hosts receive the list of their clients that may be trained together, always the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.federation import crash_federation
from support.raw_host import RawHost, next_training

MINE = ("client-1", "client-2")


async def groups(call: Any, run_id: str) -> Mapping[str, Sequence[str]]:
    """Return the companions listed in the training of each of the host's clients."""
    told: dict[str, Sequence[str]] = {}
    while len(told) < len(MINE):
        instruction = await next_training(call, run_id)
        told[instruction.client_id] = list(instruction.train.companions)
    return told


async def test_client_groups_are_the_same_after_the_coordinator_is_killed(tmp_path: Path) -> None:
    async with crash_federation(
        tmp_path, clients=3, hosts=2, count=3, rounds=1, start_hosts=False
    ) as federation:
        await federation.processes.start_host(0)
        await federation.until_attending(1)
        config = federation.files.hosts[1]
        async with RawHost.of(config) as host, host.attending(*MINE) as call:
            run_id = await federation.start_run('strategy.name="fedavg"')
            told = await groups(call, run_id)
        mine = [f"{run_id}/1.1/{client}" for client in MINE]
        assert told == dict.fromkeys(MINE, mine)  # without the other host's client
        await federation.kill_coordinator()
        await federation.restart_coordinator()
        async with RawHost.of(config, name="again") as host, host.attending(*MINE) as call:
            assert await groups(call, run_id) == told
