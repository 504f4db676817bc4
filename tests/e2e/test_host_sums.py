"""Hosts send one exact sum of their clients' updates; any grouping gives the same model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.federation import Federation, crash_federation, until

from potluck.rpc.v1 import operator_pb2

INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
SUMS = ("host_sums.enabled=true", 'selector.name="uniform"')
STRATEGIES = {
    "fedavg": ('strategy.name="fedavg"',),
    "fednova": ('strategy.name="fednova"', "training.momentum=0.5"),
    "fedadam": ('strategy.name="fedadam"', 'weighting="equal"'),
    "scaffold": ('strategy.name="scaffold"',),
}


async def digests(federation: Federation, names: Sequence[str]) -> Mapping[str, str]:
    """Return the last model digest, by strategy."""
    found = {}
    for name in names:
        run_id = await federation.start_run(*SUMS, *STRATEGIES[name])
        found[name] = await federation.finished(run_id)
    return found


async def bytes_up(federation: Federation, *assignments: str) -> int:
    run_id = await federation.start_run('strategy.name="fedavg"', *assignments)
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert {each.sums for each in history} == {1 if assignments else 0}
    return sum(each.bytes_up for each in history)


@pytest.mark.slow
async def test_any_grouping_of_clients_on_hosts_gives_the_same_model(tmp_path: Path) -> None:
    found = []
    for hosts in (1, 4):  # one sum of six updates; or two sums of two and two of one
        folder = tmp_path / str(hosts)
        folder.mkdir()
        async with crash_federation(
            folder, clients=6, hosts=hosts, count=6, rounds=2
        ) as federation:
            found.append(await digests(federation, list(STRATEGIES)))
            if hosts == 1:
                assert 5 * await bytes_up(federation, *SUMS) < await bytes_up(federation)
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(STRATEGIES)


@pytest.mark.slow
async def test_processes_killed_between_host_sums_give_the_same_model(tmp_path: Path) -> None:
    """Kill a host between its clients' updates and a coordinator that has some of the sums."""
    run = (*SUMS, *STRATEGIES["fedavg"])
    async with crash_federation(tmp_path, clients=6, hosts=2, count=6, rounds=2) as federation:
        undisturbed = await federation.finished(await federation.start_run(*run))
        mine = await clients_of(federation, "host-0")
        points, last = federation.points, f"train-{mine[-1]}"

        points.hold(last)
        run_id = await federation.start_run(*run)
        await until(lambda: points.reached(last), "the last training of a host")
        await until(lambda: len(federation.spooled()) == 1, "the other host's sum")
        await federation.kill_host(0)  # it has the updates of its other clients on disk
        await federation.kill_coordinator()
        points.release()
        await federation.restart_coordinator()
        await federation.processes.start_host(0)
        assert await federation.finished(run_id) == undisturbed
        # With over-selection, a round includes all members of the sums that completed it.
        run_id = await federation.start_run(*run, "clients_per_round=4", "round.over_selection=2")
        await federation.finished(run_id)
        for committed in await federation.history(run_id):
            included = [m for m in committed.members if m.state == INCLUDED]
            assert len(included) == 6  # one sum of three does not suffice; two have six members


async def clients_of(federation: Federation, host: str) -> list[str]:
    """Return the clients of a host, in the order of their names."""
    clients = await federation.operator.list_clients()
    return sorted(each.client_id for each in clients if each.host_id == host)
