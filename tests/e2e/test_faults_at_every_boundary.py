"""Killed between any two changes of what outlives it, a process goes on as if nothing was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.boundaries import Kills
from support.federation import crash_federation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = 2
OPEN = ['strategy.name="scaffold"', "task.central=false"]
ASKING = ['selector.name="asking"', "virtual_clock.enabled=true", "round.over_selection=1"]
PRETRAINED = [
    'selector.name="feddiverse"',
    f"profiles.triplet.pretraining_rounds={ROUNDS}",
    "profiles.triplet.bias_steps=1",
    "profiles.triplet.attribute_steps=1",
]
MASKED = ["secure_aggregation=true"]
ONE_HOST: dict[str, Any] = {"clients": 3, "hosts": 1, "count": 2}


async def killed_everywhere(
    folder: Path, assignments: list[str], machines: dict[str, Any], *, of_host: bool = False
) -> None:
    begun = time.monotonic()
    witnessed = "potluck-client" if of_host else "potluck-server"
    async with crash_federation(
        folder, rounds=ROUNDS, witnessed=witnessed, **machines
    ) as federation:
        kills = Kills(
            federation=federation,
            assignments=assignments,
            of_host=of_host,
            masked=assignments is MASKED,
            pretrained=assignments is PRETRAINED,
        )
        await kills.everywhere()
    print(f"{len(kills.aimed)} kills in {time.monotonic() - begun:.0f} s, missed: {kills.missed}")
    assert not kills.failures, "\n".join(f"{at}: {why}" for at, why in kills.failures.items())
    assert len(kills.missed) < len(kills.aimed) / 10


@pytest.mark.parametrize(
    ("assignments", "machines"),
    [
        pytest.param(OPEN, ONE_HOST, id="open"),
        pytest.param(ASKING, ONE_HOST, id="asking"),
        pytest.param(PRETRAINED, ONE_HOST, id="pretrained"),
        pytest.param(MASKED, {"clients": 5, "hosts": 5, "count": 5, "root": True}, id="masked"),
    ],
)
async def test_a_coordinator_goes_on_from_wherever_it_was_killed(
    tmp_path: Path, assignments: list[str], machines: dict[str, Any]
) -> None:
    await killed_everywhere(tmp_path, assignments, machines)


@pytest.mark.parametrize(
    "assignments", [pytest.param(OPEN, id="open"), pytest.param(ASKING, id="asking")]
)
async def test_a_host_goes_on_from_wherever_it_was_killed(
    tmp_path: Path, assignments: list[str]
) -> None:
    await killed_everywhere(tmp_path, assignments, ONE_HOST, of_host=True)
