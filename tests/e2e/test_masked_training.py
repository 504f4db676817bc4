"""Ten client processes, two of them killed, reach the same accuracy with and without masks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.federation import Federation, plugins_installed, set_values, until
from support.shared_forks import shared_forks

from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.rpc.v1 import operator_pb2

CLIENTS = 10
ROUNDS = 15
BEFORE, AFTER, SPARED = 7, 3, 9
"""Numbers of the hosts to kill in round 2, before and after their upload, and of one that lives."""
INCLUDED, LOST = operator_pb2.MEMBER_STATE_INCLUDED, operator_pb2.MEMBER_STATE_LOST


def options() -> DemoOptions:
    return DemoOptions(
        task="watched-digits",
        selector="uniform",
        strategy="fedavg",
        clients=CLIENTS,
        hosts=CLIENTS,
        count=CLIENTS,
        rounds=ROUNDS,
        seed=5,
        device="cpu",
        assignments=[
            "training.epochs=8",
            "training.learning_rate_decay=0.8",  # so that the last rounds hardly differ
            "round.grace_seconds=1",
        ],
        root=True,
    )


async def accuracy(federation: Federation, run_id: str) -> float:
    history = await federation.history(run_id)
    assert len(history) == ROUNDS
    return history[-1].metrics.accuracy


@contextlib.asynccontextmanager
async def under_way(folder: Path, options: DemoOptions) -> AsyncIterator[Federation]:
    """Run a federation of processes, with all hosts connected."""
    with plugins_installed(folder / "points", "none") as points, reserved_port() as port:
        files = write_demo_files(folder / "federation", options, port)
        for path in files.hosts:
            set_values(path, {"reconnect_maximum_seconds": 0.3})
        async with (
            LocalFederation(files, shared_forks()) as processes,
            processes.operator() as operator,
        ):
            federation = Federation(
                files=files,
                processes=processes,
                operator=operator,
                points=points,
                options=options,
            )
            await processes.start_coordinator()
            await federation.start_hosts()
            await processes.until_ready()
            yield federation


@pytest.mark.asyncio
async def test_hosts_exchange_keys_for_several_clients_while_one_trains(
    tmp_path: Path,
) -> None:
    several = replace(options(), clients=12, hosts=5, count=10, rounds=3, seed=11, task="digits")
    async with under_way(tmp_path, several) as federation:
        run_id = await federation.start_run(
            "secure_aggregation=true", "clients_per_round=12", "rounds=1", "seed=1"
        )
        await federation.finished(run_id)
        [only] = await federation.history(run_id)
        assert [member.state for member in only.members] == [INCLUDED] * 12
        found = await federation.operator.audit_disclosures(run_id)
        [summed] = [each for part in found for each in part.sums]
        # One of five hosts is assumed to collude; it has three clients.
        assert (len(summed.hosts), len(set(summed.hosts.values())), summed.quorum) == (12, 5, 8)
        await check_completed_cohort(federation)


async def check_completed_cohort(federation: Federation) -> None:
    """Check that round 2 with ten selected clients on four hosts continues with ten on five."""
    run_id = await federation.start_run("secure_aggregation=true")
    await federation.finished(run_id)
    host_of = {each.client_id: each.host_id for each in await federation.operator.list_clients()}
    for done in await federation.history(run_id):
        assert [member.state for member in done.members] == [INCLUDED] * 10
        assert len({host_of[member.client_id] for member in done.members}) == 5
        added = [each.client_id for each in done.members if each.reason == "needed for 5 hosts"]
        assert len(added) == (done.round == 2)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_masked_training_reaches_the_open_accuracy_with_two_killed_hosts(
    tmp_path: Path,
) -> None:
    async with under_way(tmp_path, options()) as federation:
        opened = await federation.start_run()
        await federation.finished(opened)
        masked = await masked_run_with_killed_hosts(federation)
        second = (await federation.history(masked))[1]
        states = {member.client_id: member.state for member in second.members}
        assert states.pop(f"client-{BEFORE}") == LOST
        assert set(states.values()) == {INCLUDED}
        there, here = await accuracy(federation, opened), await accuracy(federation, masked)
        assert there > 0.5
        assert abs(there - here) <= 0.01, f"accuracy {there:.4f} open, {here:.4f} masked"


async def masked_run_with_killed_hosts(federation: Federation) -> str:
    """Start a masked run, kill two hosts in round 2, start them again in round 3; return the id of
    the finished run.

    Clients are held before they train. Client SPARED is held in round 1 until client BEFORE can be
    held in round 2, and in round 3 until all hosts are connected again.
    """
    points = federation.points
    victim, spared = f"train-client-{BEFORE}", f"train-client-{SPARED}"
    points.hold(victim, spared)
    run_id = await federation.start_run("secure_aggregation=true")

    async def until_uploaded(number: int, round_: int) -> None:
        spool = federation.state / "spool" / run_id / f"{round_}.1"
        await until(lambda: bool(list(spool.glob(f"client-{number}@*.safetensors"))))

    await until(lambda: points.reached(victim))
    points.release(victim)
    await until_uploaded(BEFORE, 1)
    points.hold(victim)
    points.release(spared)
    await until(lambda: points.reached(victim))
    for number in (AFTER, SPARED):
        await until_uploaded(number, 2)
    points.hold(spared)
    for number in (BEFORE, AFTER):
        await federation.kill_host(number)
    await federation.until_committed(run_id, 2)
    points.release(victim)
    for number in (BEFORE, AFTER):
        await federation.processes.start_host(number)
    await federation.until_attending()
    points.release()
    await federation.finished(run_id)
    return run_id
