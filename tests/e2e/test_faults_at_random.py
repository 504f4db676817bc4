"""Two hundred kills of random processes at random times lose no round and count no update twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation

from potluck.common.errors import UnreachableError
from potluck.rpc.v1 import operator_pb2
from potluck.server.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED

KILLS = 200
SEED = 20
MOST_SECONDS = 0.5
"""Maximum number of seconds between two kills."""
CHECKED = 20
"""Number of earlier rounds that are compared after each kill."""

COORDINATOR = -1


@pytest_asyncio.fixture
async def federation(tmp_path: Path) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path,
        clients=4,
        hosts=2,
        count=3,
        rounds=100_000,
        assignments=["round.grace_seconds=120"],  # killed hosts reconnect in time
    ) as federation:
        yield federation


async def grown(
    federation: Federation, run_id: str, known: list[operator_pb2.CommittedRound]
) -> list[operator_pb2.CommittedRound]:
    """Return the rounds known before and those committed since. Check that no round is missing, and
    that the last ones known are unchanged; the test checks all in the end."""
    start = max(0, len(known) - CHECKED)
    newest = await federation.history(run_id, after_round=start)
    assert [entry.round for entry in newest] == list(range(start + 1, start + len(newest) + 1))
    assert newest[: len(known) - start] == known[start:]
    return known[:start] + newest


async def killed(federation: Federation, victims: list[int]) -> None:
    """Kill all victims at once and restart them."""
    kills = [
        federation.kill_coordinator() if victim == COORDINATOR else federation.kill_host(victim)
        for victim in victims
    ]
    await asyncio.gather(*kills)
    if COORDINATOR in victims:
        await federation.processes.start_coordinator()
    for victim in victims:
        if victim != COORDINATOR:
            await federation.processes.start_host(victim)
    await federation.processes.until_ready()


async def test_random_kills_lose_no_round_and_count_no_update_twice(federation: Federation) -> None:
    generator = random.Random(SEED)
    await federation.until_attending()
    run_id = await federation.start_run()
    history: list[operator_pb2.CommittedRound] = []
    kills = 0
    while kills < KILLS:
        await asyncio.sleep(generator.uniform(0.0, MOST_SECONDS))  # kill at a random moment
        with contextlib.suppress(UnreachableError):
            history = await grown(federation, run_id, history)
        victims = [each for each in (COORDINATOR, 0, 1) if generator.random() < 0.5]
        await killed(federation, victims)
        kills += len(victims)
        history = await grown(federation, run_id, history)
        print(f"{kills} kills, {len(history)} rounds", flush=True)
        if generator.random() < 0.3:  # otherwise, the next kill may hit hosts that are starting
            await federation.until_attending()
    await federation.until_committed(run_id, len(history) + 1)
    await federation.operator.stop_run(run_id)
    known, history = history, await federation.history(run_id)
    assert history[: len(known)] == known
    assert [entry.round for entry in history] == list(range(1, len(history) + 1))
    print(f"{kills} kills, {len(history)} rounds")
    assert {member.state for entry in history for member in entry.members} == {INCLUDED}

    # Every model equals that of an undisturbed run, so each update is in its model exactly once.
    undisturbed = await federation.start_run(f"rounds={len(history)}")
    await federation.finished(undisturbed)
    expected = await federation.history(undisturbed)
    assert [e.model_blake3 for e in history] == [e.model_blake3 for e in expected]

    await federation.coordinator.stop()  # stop it: its lock must be released
    with Store.open(f"sqlite:///{federation.state / 'potluck.sqlite3'}") as store:
        stored = store.rounds(run_id)
    assert [row.model_blake3 for row in stored] == [entry.model_blake3 for entry in history]
    assert not list(federation.state.glob("spool/*"))
    models = {path.stem for path in (federation.state / "models").glob("*.safetensors")}
    assert len(models) <= 5, "models that are no longer needed are left behind"
    assert not [path for path in (federation.state / "models").iterdir() if path.name[0] == "."]
