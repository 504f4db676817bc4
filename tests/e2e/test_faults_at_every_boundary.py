"""Killed between any two changes of what outlives it, a coordinator goes on as if nothing was."""

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


@pytest.mark.parametrize(
    ("assignments", "machines"),
    [
        pytest.param(OPEN, {"clients": 3, "hosts": 1, "count": 2}, id="open"),
        pytest.param(ASKING, {"clients": 3, "hosts": 1, "count": 2}, id="asking"),
        pytest.param(PRETRAINED, {"clients": 3, "hosts": 1, "count": 2}, id="pretrained"),
        pytest.param(MASKED, {"clients": 5, "hosts": 5, "count": 5, "root": True}, id="masked"),
    ],
)
async def test_a_run_survives_a_kill_at_every_boundary(
    tmp_path: Path, assignments: list[str], machines: dict[str, Any]
) -> None:
    begun = time.monotonic()
    async with crash_federation(tmp_path, rounds=ROUNDS, **machines) as federation:
        kills = Kills(
            federation=federation,
            assignments=assignments,
            masked=assignments is MASKED,
            pretrained=assignments is PRETRAINED,
        )
        await kills.everywhere()
    print(f"{len(kills.aimed)} kills in {time.monotonic() - begun:.0f} s, missed: {kills.missed}")
    assert not kills.failures, "\n".join(f"{at}: {why}" for at, why in kills.failures.items())
    assert len(kills.missed) < len(kills.aimed) / 10
