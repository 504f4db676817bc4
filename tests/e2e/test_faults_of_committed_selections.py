"""A coordinator that is killed while it commits to a selection continues with the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation

from potluck.verifiable.coordinator.selection_log import LoggedAttempt, SelectionLog

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("selections"),
        clients=6,
        count=2,
        rounds=2,
        assignments=[
            'strategy.name="fedavg"',
            'selector.name="round-robin"',
            "selection.verifiable=true",
            "selection.hosts_verify=true",
        ],
    ) as federation:
        yield federation


def attempts(federation: Federation, run_id: str) -> list[LoggedAttempt]:
    return SelectionLog(federation.state, run_id).attempts


def audit(federation: Federation, run_id: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "potluck.deploy", "audit", "selection", run_id, "--json"]
    done = subprocess.run(
        [*command, "--config", str(federation.files.coordinator)],
        cwd=federation.files.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        pytest.param("after-sync-selections.jsonl-6", False, id="before hosts commit"),
        pytest.param("after-sync-selections.jsonl-7", True, id="between commit and reveal"),
        pytest.param("after-sync-selections.jsonl-8", True, id="after the reveal"),
        pytest.param("after-sync-selections.jsonl-9", True, id="before hosts see the outcome"),
        pytest.param("after-sync-selections.jsonl-10", True, id="before the round is committed"),
    ],
)
async def test_coordinator_killed_during_a_selection_draws_the_same_seed(
    federation: Federation, point: str, committed: bool
) -> None:
    """The file has five lines for each round; the kill is in round 2."""
    federation.points.note_boundaries()
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    [_, killed] = attempts(federation, run_id)
    assert (killed.chain.attendees is not None) == committed
    await federation.restart_coordinator()
    await federation.finished(run_id)
    [_, resumed] = attempts(federation, run_id)
    outcome = resumed.chain.outcome
    assert outcome is not None
    assert outcome.share == killed.share != ""
    assert len(outcome.shares) == 3
    if committed:
        assert outcome.previous == killed.chain.attendees_sha256
    found = audit(federation, run_id)
    assert [(each["round"], each["attempt"], each["agrees"]) for each in found] == [
        (1, 1, True),
        (2, 1, True),
    ]
