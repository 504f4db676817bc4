"""Host processes killed around the charge for a masked update with noise.

All tests share a federation of seven hosts, of which two may be lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED, LOST = operator_pb2.MEMBER_STATE_INCLUDED, operator_pb2.MEMBER_STATE_LOST

CLIENTS = 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("private"),
        clients=CLIENTS,
        hosts=CLIENTS,
        count=CLIENTS,
        rounds=1,
        assignments=[
            "secure_aggregation=true",
            "round.grace_seconds=3",
            "privacy.unit=client",
            "privacy.noise_multiplier=8",
            "privacy.clip=0.5",
        ],
        root=True,
        witnessed="potluck-client",
    ) as federation:
        await federation.until_attending()
        yield federation


def charges(federation: Federation, run_id: str) -> list[int]:
    """Return how often each client was charged for a run."""
    counts = []
    for number in range(CLIENTS):
        path = federation.files.folder / f"host-{number}" / "privacy" / f"client-{number}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        counts.append(sum(json.loads(line)["run"] == run_id for line in lines[1:]))
    return counts


async def states(federation: Federation, run_id: str) -> list[int]:
    """Return each client's state in the only round."""
    [entry] = await federation.history(run_id)
    found = {member.client_id: member.state for member in entry.members}
    return [found[f"client-{number}"] for number in range(CLIENTS)]


async def killed(federation: Federation) -> int:
    """Wait until a host's process has ended. Returns the host's number."""
    hosts = federation.processes.hosts
    await until(lambda: any(hosts[each].exit_code is not None for each in range(CLIENTS)))
    [number] = [each for each in range(CLIENTS) if hosts[each].exit_code is not None]
    return number


@pytest.mark.parametrize(
    ("point", "charge"),
    [
        ("before-rename-privacy.jsonl-1", 0),
        ("after-rename-privacy.jsonl-1", 1),
        ("after-rename-updates.json-1", 1),  # the noisy vector is on disk
    ],
)
async def test_host_killed_around_its_charge_never_records_less_than_it_spent(
    federation: Federation, point: str, charge: int
) -> None:
    """No sum contains its vector. The other six clients are charged once each."""
    federation.points.note_boundaries()
    federation.points.kill(point)
    run_id = await federation.start_run()
    number = await killed(federation)
    await federation.finished(run_id)
    lost, found = [number == each for each in range(CLIENTS)], await states(federation, run_id)
    assert found == [LOST if each else INCLUDED for each in lost]
    assert charges(federation, run_id) == [charge if each else 1 for each in lost]
    await back(federation, number)


async def back(federation: Federation, number: int) -> None:
    """Start a host again."""
    await federation.processes.start_host(number)
    await federation.until_attending()
    federation.points.clear()
