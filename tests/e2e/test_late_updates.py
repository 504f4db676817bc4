"""Updates that miss their round and join a later one, in a federation whose processes die."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until
from support.late_updates import late_ones_stored, run_with_late_ones

from potluck.server.store import Store
from potluck.server.store.records import MemberState, RoundRow

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIMULATED = [
    'selector.name="refl"',
    "selector.rest=1",
    "round.over_selection=1",
    "round.late_updates.rounds=3",
    "virtual_clock.enabled=true",
    'virtual_clock.draw="client"',
    "virtual_clock.tail_per_sample=5",
    "rounds=7",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    async with crash_federation(
        tmp_path_factory.mktemp("late"),
        clients=6,
        count=2,
        rounds=4,
        assignments=['strategy.name="fedavg"', 'selector.name="uniform"'],
    ) as federation:
        yield federation


async def rounds_of(federation: Federation, run_id: str) -> list[RoundRow]:
    """Return the stored committed rounds of a finished run."""
    await federation.kill_coordinator()
    with Store.open(f"sqlite:///{federation.state / 'potluck.sqlite3'}") as store:
        rounds = store.rounds(run_id)
    await federation.restart_coordinator()
    await federation.until_attending()
    return rounds


def arrivals(rounds: list[RoundRow]) -> dict[int, set[tuple[str, int]]]:
    """Return by round the late updates that would arrive in it, as (client, round of the update).

    This follows from the simulated seconds alone.
    """
    ends = [sum(row.seconds for row in rounds[: number + 1]) for number in range(len(rounds))]
    found: dict[int, set[tuple[str, int]]] = {row.key.round: set() for row in rounds}
    for number, row in enumerate(rounds):
        for member in row.members:
            if member.state not in (MemberState.LATE, MemberState.SPARED):
                continue
            assert member.update is not None
            at = (ends[number - 1] if number else 0.0) + member.update.seconds
            later = range(number + 1, min(number + 4, len(rounds)))
            joined = next((each for each in later if at <= ends[each]), None)
            if joined is not None:
                found[rounds[joined].key.round].add((member.client_id, row.key.round))
    return found


async def test_simulated_late_updates_join_the_round_of_their_arrival(
    federation: Federation,
) -> None:
    run_id = await federation.start_run(*SIMULATED)
    digest = await federation.finished(run_id)
    history = await federation.history(run_id)
    rounds = await rounds_of(federation, run_id)
    joined = {row.key.round: {(each.client_id, each.round) for each in row.late} for row in rounds}
    assert joined == arrivals(rounds)
    assert sum(map(len, joined.values())) >= 3
    for row, shown in zip(rounds, history, strict=True):
        weights = [each.weight for each in row.late]
        assert all(weight is not None and 0 < weight < 1 for weight in weights)
        assert [(each.client_id, each.round, each.weight) for each in shown.late] == [
            (each.client_id, each.round, each.weight) for each in row.late
        ]
        busy = {
            client
            for number, some in joined.items()
            if number > row.key.round
            for client, begun in some
            if begun < row.key.round
        }
        assert busy.isdisjoint(member.client_id for member in row.members)
    for beta in (0.0, 1.0):
        other = await federation.start_run(*SIMULATED, f"round.late_updates.beta={beta}")
        assert await federation.finished(other) != digest


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("number", [2, 3, 6])
async def test_simulated_late_updates_survive_a_kill(
    federation: Federation, number: int, point: str
) -> None:
    undisturbed = await federation.start_run(*SIMULATED)
    digest = await federation.finished(undisturbed)
    federation.points.note_boundaries()
    federation.points.kill(f"{point}-commit_round-{number}")
    run_id = await federation.start_run(*SIMULATED)
    assert await federation.coordinator.ended() == 137
    await federation.restart_coordinator()
    again = await federation.finished(run_id)
    assert await told(federation, run_id) == await told(federation, undisturbed)
    assert again == digest


async def told(federation: Federation, run_id: str) -> list[object]:
    """Return the stored rounds of a run, without the fields for digests and traffic."""
    return [
        (row.members, row.seconds, [(each.client_id, each.round, each.weight) for each in row.late])
        for row in await rounds_of(federation, run_id)
    ]


async def with_late_ones(federation: Federation, disturbance: str) -> tuple[str, str]:
    """Finish a run with late updates; return its id and the digest of its model. See
    `run_with_late_ones`."""
    points, last = federation.points, len(federation.files.hosts) - 1

    async def disturb() -> None:
        if disturbance == "host":
            await federation.kill_host(last)
            await federation.processes.start_host(last)
        if disturbance == "coordinator early":
            await federation.kill_coordinator()
            await federation.restart_coordinator()
        if disturbance == "coordinator":
            points.kill("after-add_late_update-2")

    async def come(run_id: str) -> None:
        if disturbance == "coordinator":
            assert await federation.coordinator.ended() == 137
            await federation.restart_coordinator()
        else:
            await until(lambda: late_ones_stored(federation, run_id) == 2, "late updates")

    run_id = await run_with_late_ones(federation, disturb, come=come)
    return run_id, await federation.finished(run_id)


@pytest.mark.parametrize(
    "disturbance",
    [
        "none",
        "coordinator",
        pytest.param("coordinator early", marks=pytest.mark.slow),
        pytest.param("host", marks=pytest.mark.slow),
    ],
)
async def test_late_updates_join_the_current_round_after_kills(
    federation: Federation, disturbance: str
) -> None:
    run_id, digest = await with_late_ones(federation, disturbance)
    first, second, third = await rounds_of(federation, run_id)
    states = {member.client_id: member.state for member in first.members}
    assert [states[f"client-{number}"] for number in range(6)] == [MemberState.INCLUDED] * 4 + [
        MemberState.LATE
    ] * 2
    assert {member.client_id for member in second.members} == {
        f"client-{number}" for number in range(4)
    }, "who is still at work is not selected"
    assert [(late.client_id, late.round) for late in second.late] == [
        ("client-4", 1),
        ("client-5", 1),
    ]
    assert max(late.weight or 0.0 for late in second.late) == pytest.approx(0.54624, abs=1e-5)
    assert {member.client_id for member in third.members} >= {"client-4", "client-5"}
    assert not third.late
    digests.setdefault("model", digest)
    assert digest == digests["model"], "whatever was killed"


digests: dict[str, str] = {}
