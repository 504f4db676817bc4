"""Processes killed during rounds with masked updates.

All tests share a federation: each starts a run of its own, with the same seed, and restarts what
it has killed. Sums of the same clients' updates are equal bit for bit, whatever keys masked them.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.deploy.commands.disclosure_audit_command import sum_values
from potluck.rpc.v1 import operator_pb2
from potluck.secagg.host.sum_ledger import SumLedger

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED, LOST = operator_pb2.MEMBER_STATE_INCLUDED, operator_pb2.MEMBER_STATE_LOST

CLIENTS = 7
"""Number of clients, two of which may be lost."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("masked"),
        clients=CLIENTS,
        hosts=CLIENTS,
        count=CLIENTS,
        rounds=2,
        assignments=["secure_aggregation=true", "round.grace_seconds=3"],
        root=True,
    ) as federation:
        yield federation


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> list[str]:
    """Return the digests of the models of a run without faults, by round."""
    await shared.until_attending()
    run_id = await shared.start_run()
    await shared.finished(run_id)
    return [entry.model_blake3 for entry in await shared.history(run_id)]


def uploads(federation: Federation, number: int) -> int:
    """Return the number of times that a client has had masks for an update."""
    ledger = SumLedger(federation.files.folder / f"host-{number}" / "sums")
    return len(ledger.of(f"client-{number}").uploads)


async def states(federation: Federation, run_id: str) -> list[dict[str, int]]:
    """Return each client's final state, by committed round."""
    history = await federation.history(run_id)
    return [{m.client_id: m.state for m in entry.members} for entry in history]


async def back(federation: Federation, number: int) -> None:
    """Start a host again; wait until all hosts are connected."""
    await federation.processes.start_host(number)
    await federation.until_attending()


async def test_host_killed_before_its_masked_upload_is_lost(federation: Federation) -> None:
    before = uploads(federation, 2)
    federation.points.hold("train-client-2")
    run_id = await federation.start_run("seed=8")
    await until(lambda: uploads(federation, 2) > before)  # the other updates contain its masks
    await federation.kill_host(2)
    federation.points.release()
    await federation.finished(run_id)
    first, _ = await states(federation, run_id)
    assert first.pop("client-2") == LOST
    assert set(first.values()) == {INCLUDED}
    await back(federation, 2)


async def test_host_killed_after_its_masked_upload_is_included(federation: Federation) -> None:
    federation.points.hold("train-client-5")
    run_id = await federation.start_run("seed=9", "rounds=1")
    await until(lambda: any("client-2@" in path.name for path in federation.spooled()))
    await federation.kill_host(2)
    federation.points.release()
    model = await federation.finished(run_id)
    [only] = await states(federation, run_id)
    assert set(only.values()) == {INCLUDED}
    await back(federation, 2)
    undisturbed = await federation.start_run("seed=9", "rounds=1")
    assert await federation.finished(undisturbed) == model


async def test_coordinator_killed_during_a_masked_round_selects_again(
    federation: Federation, undisturbed: list[str]
) -> None:
    federation.points.hold("train-client-5")
    run_id = await federation.start_run()
    await until(lambda: len(federation.spooled()) >= 3)
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    federation.points.release()
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert [entry.model_blake3 for entry in history] == undisturbed
    found = await federation.operator.audit_disclosures(run_id)
    sums = [sum_values(each) for part in found for each in part.sums if each.run_id == run_id]
    assert [(each["round"], each["attempt"], each["released"]) for each in sums] == [
        (1, 2, True),
        (2, 1, True),
    ]


@pytest.mark.parametrize("point", ["weigh", "apply"])
async def test_coordinator_killed_after_unmasking_receives_the_identical_sum_again(
    federation: Federation, undisturbed: list[str], point: str
) -> None:
    """By then clients have released their shares; they release them again for the identical set
    only."""
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    await federation.finished(run_id)
    assert [e.model_blake3 for e in await federation.history(run_id)] == undisturbed


async def test_run_stopped_during_a_masked_round_leaves_no_files(federation: Federation) -> None:
    federation.points.hold("train-client-5")
    run_id = await federation.start_run()
    await until(lambda: len(federation.spooled()) >= 3)
    await federation.operator.stop_run(run_id)
    federation.points.release()
    assert not list(federation.state.glob("spool/*"))
    await federation.finished(await federation.start_run())


async def test_clients_refuse_to_repeat_a_sum_without_one_of_them(
    federation: Federation, undisturbed: list[str]
) -> None:
    """The difference of the two sums would be the update of the missing client."""
    before = uploads(federation, 2)
    federation.points.hold("train-client-2")
    run_id = await federation.start_run()
    await until(lambda: uploads(federation, 2) > before)
    await federation.kill_host(2)
    federation.points.release()
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert "refused (released: " in status.reason
    assert "start from another model" in status.reason
    await back(federation, 2)


@pytest.mark.slow
async def test_backup_restored_while_hosts_keep_running_gives_the_same_model(
    federation: Federation, undisturbed: list[str], tmp_path: Path
) -> None:
    """Hosts keep masked updates for sums that the restored coordinator does not know."""
    run_id = await federation.start_run()
    await federation.until_committed(run_id, 1)
    await federation.kill_coordinator()
    shutil.copytree(federation.state, tmp_path / "backup")
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1]
    await federation.kill_coordinator()
    shutil.rmtree(federation.state)
    shutil.copytree(tmp_path / "backup", federation.state)
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1]
    assert "is late" not in federation.files.log("coordinator").read_text()
