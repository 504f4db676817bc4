"""A process killed between any two changes of its persistent state resumes without a difference.

Open runs are killed at every change. Other runs make the same changes and some of their own: they
are killed at one change of each kind, the last one, or the first one with pre-training, which comes
first.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from support.boundaries import Kills
from support.federation import crash_federation
from support.relays import Relay, relays_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

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
SUMS = ["host_sums.enabled=true", 'selector.name="uniform"', 'strategy.name="fedavg"']
UNEQUAL = {
    tuple(MASKED): ("blake3", "size", "loss"),  # masks and losses differ by run
    tuple(SUMS): ("blake3", "size"),  # of the sum's file, whose members may differ
}
AT: dict[tuple[str, ...], Literal["every", "first"]] = {
    tuple(OPEN): "every",
    tuple(PRETRAINED): "first",
}
ONE_HOST: dict[str, Any] = {"clients": 3, "hosts": 1, "count": 2}
TWO_HOSTS: dict[str, Any] = {"clients": 4, "hosts": 2, "count": 4}
COORDINATOR, HOST, RELAY = "potluck-server", "potluck-client", "potluck-relay"


async def killed_everywhere(
    folder: Path, assignments: list[str], machines: dict[str, Any], witnessed: str
) -> None:
    begun = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        federation = await stack.enter_async_context(
            crash_federation(
                folder,
                rounds=ROUNDS,
                witnessed=witnessed,
                start_hosts=witnessed != RELAY,
                **machines,
            )
        )
        relay: Relay | None = None
        if witnessed == RELAY:
            behind = {"gate": range(len(federation.files.hosts))}
            relay = (await stack.enter_async_context(relays_of(federation, behind)))["gate"]
            await federation.start_hosts()
        kills = Kills(
            federation=federation,
            assignments=assignments,
            of_host=witnessed == HOST,
            relay=relay,
            unequal=UNEQUAL.get(tuple(assignments), ()),
            pretrained=assignments is PRETRAINED,
            at=AT.get(tuple(assignments), "last"),
        )
        await kills.everywhere()
    print(f"{len(kills.aimed)} kills in {time.monotonic() - begun:.0f} s, missed: {kills.missed}")
    assert not kills.failures, "\n".join(f"{at}: {why}" for at, why in kills.failures.items())
    assert len(kills.missed) <= max(1, len(kills.aimed) // 10)


@pytest.mark.parametrize(
    ("assignments", "machines"),
    [
        pytest.param(OPEN, ONE_HOST, id="open"),
        pytest.param(ASKING, ONE_HOST, id="asking"),
        pytest.param(PRETRAINED, ONE_HOST, id="pretrained"),
        pytest.param(MASKED, {"clients": 5, "hosts": 5, "count": 5, "root": True}, id="masked"),
        pytest.param(SUMS, TWO_HOSTS, id="sums"),
    ],
)
async def test_coordinator_killed_at_any_write_gives_the_same_run(
    tmp_path: Path, assignments: list[str], machines: dict[str, Any]
) -> None:
    await killed_everywhere(tmp_path, assignments, machines, COORDINATOR)


@pytest.mark.parametrize(
    "assignments",
    [
        pytest.param(OPEN, id="open"),
        pytest.param(ASKING, id="asking"),
        pytest.param(SUMS, id="sums"),
    ],
)
async def test_host_killed_at_any_write_gives_the_same_run(
    tmp_path: Path, assignments: list[str]
) -> None:
    await killed_everywhere(tmp_path, assignments, ONE_HOST, HOST)


async def test_relay_killed_at_any_write_gives_the_same_run(tmp_path: Path) -> None:
    await killed_everywhere(tmp_path, SUMS, TWO_HOSTS, RELAY)
