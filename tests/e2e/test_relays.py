"""Federations with relays in between: real processes, mutual TLS on both legs, kills."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import OVER, Federation, Points, crash_federation, until
from support.relays import Relay, relays_of
from support.shared_forks import shared_forks

from potluck.deploy.local.demo_files import DemoOptions, reserved_port, write_demo_files
from potluck.deploy.local.local_federation import LocalFederation
from potluck.rpc.v1 import operator_pb2
from potluck.verifiable.coordinator.selection_log import SelectionLog

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
SUMS = ("host_sums.enabled=true", 'selector.name="uniform"', 'strategy.name="fedavg"')
LARGE = ("task.parameters=4000000", "rounds=2")  # 16 MB, so that a transfer takes a while


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("relays")
    async with crash_federation(folder, clients=6, hosts=3, count=6, rounds=2) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flat(federation: Federation) -> dict[str, str]:
    """Return the digests of the final models of runs whose hosts all connect directly."""
    await federation.until_attending()
    return {
        "small": await federation.finished(await federation.start_run()),
        "large": await federation.finished(await federation.start_run(*LARGE)),
        "sums": await federation.finished(await federation.start_run(*SUMS)),
    }


def delivered(relay: Relay) -> float:
    """Return the number of updates whose receipt the coordinator has confirmed to the relay."""
    return relay.metric("potluck_relay_deliveries_total", outcome="delivered")


async def moved(federation: Federation, relays: dict[str, Relay]) -> None:
    """Restart the hosts and wait until they are connected through the relays."""
    for host in list(federation.processes.hosts.values()):
        await host.stop()
    # Delete cached models, which hosts would not fetch again.
    for path in federation.files.folder.glob("host-*/models/*"):
        path.unlink()
    await federation.start_hosts()

    def behind() -> int:
        return sum(relay.events().count("host connected") for relay in relays.values())

    await until(lambda: behind() == len(federation.files.hosts), "all hosts attend through relays")
    await federation.until_attending()


async def test_two_relays_killed_once_each_give_the_same_model(
    federation: Federation, flat: dict[str, str]
) -> None:
    async with relays_of(federation, {"gate-a": [0, 1], "gate-b": [2]}) as relays:
        a, b = relays["gate-a"], relays["gate-b"]
        await moved(federation, relays)
        through = {client.relay for client in await federation.operator.list_clients()}
        assert through == {"gate-a", "gate-b"}
        assert a.metric("potluck_relay_hosts_attending") == 2
        assert a.metric("potluck_relay_clients_attending") == 4

        assert await federation.finished(await federation.start_run()) == flat["small"]
        came = a.metric("potluck_relay_downloads_total", source="coordinator")
        lent = a.metric("potluck_relay_downloads_total", source="cache")
        assert came == 2, "one for each round"
        assert came + lent == 4, "to each host"
        await until(lambda: delivered(a) == 8)
        await until(lambda: not a.held())

        # Kill relay a while it receives updates, and relay b while it holds complete ones.
        def on_its_way() -> bool:
            return any(a.state.glob("updates/*"))

        def held() -> bool:
            return any(b.held())

        for relay, under_way in ((a, on_its_way), (b, held)):
            caught = False
            while not caught:  # on a busy machine, it may be over before the test looks
                run_id = await federation.start_run(*LARGE)
                while not under_way() and (await federation.status(run_id)).state not in OVER:
                    pass
                caught = under_way()
                await relay.kill()
                await relay.start()
                assert await federation.finished(run_id) == flat["large"]
                history = await federation.history(run_id)
                assert [len(entry.members) for entry in history] == [6, 6]
        await until(lambda: not (a.held() or b.held()))


async def test_relays_that_sum_host_updates_give_the_same_model(
    federation: Federation, flat: dict[str, str]
) -> None:
    names = {"sum-a": [0, 1], "sum-b": [2]}
    async with relays_of(federation, names, settings={"sum_wait_seconds": 60}) as relays:
        a = relays["sum-a"]
        await moved(federation, relays)
        run_id = await federation.start_run(*SUMS)
        assert await federation.finished(run_id) == flat["sums"]
        await until(lambda: delivered(a) == 4)
        came, went = (
            a.metric("potluck_relay_transfer_bytes_total", leg=leg, direction="up")
            for leg in ("hosts", "coordinator")
        )
        assert went < 0.6 * came, "two hosts' sums are one"

        # Kill relay a while it holds one host's sum and waits for the other's, and kill the
        # coordinator.
        federation.points.hold("train-client-2")
        run_id = await federation.start_run(*SUMS)
        await until(lambda: any(a.held()), "a sum held by sum-a")
        await until(lambda: federation.points.reached("train-client-2"))
        assert (await federation.status(run_id)).committed_rounds == 0
        await a.kill()
        assert a.held()
        await federation.kill_coordinator()
        await a.start()
        await federation.restart_coordinator()
        federation.points.release()
        assert await federation.finished(run_id) == flat["sums"]
        await until(lambda: not a.held())


async def test_masked_rounds_work_through_a_relay_and_count_the_hosts_behind_it(
    tmp_path: Path,
) -> None:
    """Half of the hosts are behind the relay. Clients count hosts by the records that the
    federation root has signed, and a relay has no member keys. So the sum is over six hosts, as
    without a relay. All six hosts make the seed of the selection together."""
    options = DemoOptions(
        task="digits",
        selector="uniform",
        strategy="fedavg",
        clients=12,
        hosts=6,
        count=12,
        rounds=1,
        seed=5,
        device="cpu",
        root=True,
    )
    with reserved_port() as port:
        files = write_demo_files(tmp_path / "federation", options, port)
        async with (
            LocalFederation(files, shared_forks()) as processes,
            processes.operator() as operator,
        ):
            federation = Federation(
                files=files,
                processes=processes,
                operator=operator,
                points=Points(tmp_path),
                options=options,
            )
            await processes.start_coordinator()
            await processes.until_ready()
            async with relays_of(federation, {"mask": [0, 1, 2]}) as relays:
                await federation.start_hosts()
                await federation.until_attending()
                run_id = await federation.start_run(
                    "secure_aggregation=true",
                    "selection.verifiable=true",
                    "selection.hosts_verify=true",
                )
                await federation.finished(run_id)
                [only] = await federation.history(run_id)
                assert [member.state for member in only.members] == [INCLUDED] * 12
                found = await operator.audit_disclosures(run_id)
                [summed] = [each for part in found for each in part.sums]
                hosts = len(set(summed.hosts.values()))
                assert (len(summed.hosts), hosts, summed.quorum) == (12, 6, 8)
                await until(lambda: delivered(relays["mask"]) == 6)
                [attempt] = SelectionLog(federation.state, run_id).attempts
                assert attempt.chain.attendees is not None
                assert len(attempt.chain.attendees.speakers) == len(attempt.shares or ()) == 6
                assert [len(signed) for signed in attempt.receipts.values()] == [6, 6]
