"""Selectors that learn from clients in every round, and a coordinator that dies meanwhile.

Durations are simulated, since measured ones differ from one run to the next.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("selectors"),
        clients=6,
        count=2,
        rounds=4,
        assignments=['strategy.name="fedavg"', "virtual_clock.enabled=true"],
    ) as shared:
        yield shared


async def picked(federation: Federation, run_id: str) -> list[list[tuple[str, str]]]:
    """Each round's cohort, with the reasons."""
    history = await federation.history(run_id)
    return [[(member.client_id, member.reason) for member in row.members] for row in history]


@pytest.mark.parametrize("name", ["pow-d", "flash", "oort"])
async def test_a_coordinator_killed_changes_nothing(federation: Federation, name: str) -> None:
    """pow-d and flash wait for answers, which are computed with the model; oort evaluates it."""
    chosen = f'selector.name="{name}"'
    undisturbed = await federation.start_run(chosen)
    digest = await federation.finished(undisturbed)
    federation.points.hold("forward")
    run_id = await federation.start_run(chosen)
    await until(lambda: federation.points.reached("forward"))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == digest
    assert await picked(federation, run_id) == await picked(federation, undisturbed)
