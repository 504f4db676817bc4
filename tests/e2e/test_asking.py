"""A selector asks real hosts before it chooses, whatever happens to either side meanwhile.

All tests share the processes: each starts a run of its own with the same seed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS, COUNT, ROUNDS = 6, 2, 2
ASKING = 'selector.name="asking"'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    folder = tmp_path_factory.mktemp("asking")
    async with crash_federation(
        folder, clients=CLIENTS, count=COUNT, rounds=ROUNDS, assignments=[ASKING]
    ) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(shared: Federation) -> list[operator_pb2.CommittedRound]:
    """The history of a run that nothing happened to."""
    run_id = await shared.start_run()
    await shared.finished(run_id)
    return await shared.history(run_id)


def lines(federation: Federation, name: str) -> list[str]:
    path = federation.points.folder / name
    return path.read_text().splitlines() if path.exists() else []


def observed(federation: Federation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(federation, "observed")]


async def test_whom_it_chooses_is_what_they_answered(federation: Federation) -> None:
    run_id = await federation.start_run()
    await federation.finished(run_id)
    history = await federation.history(run_id)
    assert [seen["round"] for seen in observed(federation)] == [1, 2]
    for seen, committed in zip(observed(federation), history, strict=True):
        everybody, half = seen["asked"]
        assert everybody == list(range(CLIENTS))
        losses = dict(zip(everybody, seen["losses"][0], strict=True))
        ranked = sorted(losses, key=lambda row: -losses[row])
        assert half == ranked[: CLIENTS // 2]
        assert seen["losses"][1] == [losses[row] for row in half], "the same question, twice"
        cohort = [f"client-{row}" for row in ranked[:COUNT]]
        assert [member.client_id for member in committed.members] == cohort
        assert [member.reason for member in committed.members] == [
            f"loss {losses[row]:.6f}" for row in ranked[:COUNT]
        ]
    for row in range(CLIENTS):
        times = sum(row in asked for seen in observed(federation) for asked in seen["asked"])
        assert len(lines(federation, f"answered-client-{row}")) == times


@pytest.mark.parametrize("point", ["ask", "answer-1", "answer-2"])
async def test_a_coordinator_killed_while_its_selector_asks(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound], point: str
) -> None:
    federation.points.kill(point)
    run_id = await federation.start_run()
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1].model_sha256
    assert await federation.history(run_id) == unlike_only_in_time(
        undisturbed, await federation.history(run_id)
    )
    # What was answered before the kill is not asked again.
    first = [seen for seen in observed(federation) if seen["round"] == 1][-1]
    for row in range(CLIENTS):
        asked = sum(row in rows for seen in observed(federation) for rows in seen["asked"])
        assert len(lines(federation, f"answered-client-{row}")) == asked
    assert len(first["asked"]) == 2


async def test_a_coordinator_killed_while_clients_answer(
    federation: Federation, undisturbed: list[operator_pb2.CommittedRound]
) -> None:
    federation.points.hold("question-client-3")
    run_id = await federation.start_run()
    await until(lambda: federation.points.reached("question-client-3"))
    await until(lambda: bool(lines(federation, "answered-client-0")))
    await federation.kill_coordinator()
    federation.points.release()
    await federation.restart_coordinator()
    assert await federation.finished(run_id) == undisturbed[-1].model_sha256
    assert len(lines(federation, "answered-client-0")) <= 2 * ROUNDS, "hosts answer from memory"


def unlike_only_in_time(
    undisturbed: list[operator_pb2.CommittedRound], history: list[operator_pb2.CommittedRound]
) -> list[operator_pb2.CommittedRound]:
    """The undisturbed history with the durations, byte counts and hosts' numbers of another."""
    expected: list[operator_pb2.CommittedRound] = []
    for one, other in zip(undisturbed, history, strict=True):
        copy = operator_pb2.CommittedRound()
        copy.CopyFrom(one)
        copy.seconds, copy.bytes_down, copy.bytes_up = (
            other.seconds,
            other.bytes_down,
            other.bytes_up,
        )
        for mine, theirs in zip(copy.members, other.members, strict=True):
            mine.seconds = theirs.seconds
        expected.append(copy)
    return expected
