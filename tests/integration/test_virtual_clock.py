"""Simulated durations in a federation of processes, without real waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.federation import Federation
from support.profile_federation import profile_federation

from potluck.common.learning.availability_trace import TraceSpan, trace_text
from potluck.common.learning.virtual_clock import VirtualClock, pace
from potluck.common.names import ClientId
from potluck.common.tasks.digits import Digits
from potluck.server.store import Store
from potluck.server.store.records import MemberRow, MemberState

pytestmark = pytest.mark.asyncio(loop_scope="function")

CLIENTS = 6
CLOCK = VirtualClock(enabled=True, tail_per_sample=10.0)
ON = ["virtual_clock.enabled=true", "virtual_clock.tail_per_sample=10"]


def held(client: str) -> int:
    """Return the number of a client's training samples."""
    return len(Digits(clients=CLIENTS).client_data(ClientId(client), None).train)


def simulated(client: str, round_number: int) -> float:
    """Return a client's simulated seconds in the runs of this module, whose seed is 7."""
    return held(client) * pace(CLOCK, seed=7, client=client, round_number=round_number)


def members(federation: Federation, run_id: str) -> list[list[MemberRow]]:
    """Return each round's members from the store."""
    with Store.open(f"sqlite:///{federation.state / 'potluck.sqlite3'}") as store:
        return [list(row.members) for row in store.rounds(run_id)]


async def test_clients_report_simulated_durations_and_utilities(tmp_path: Path) -> None:
    """The simulated durations are thousands of seconds, for which the test does not wait.

    FLASH trains on nine tenths of the samples and validates on the last tenth.
    """
    async with profile_federation(
        tmp_path,
        selector="oort",
        clients=CLIENTS,
        count=3,
        rounds=3,
        assignments=ON,
        disclosure={"questions": ["context"]},
    ) as federation:
        run_id = await federation.start_run()
        await federation.finished(run_id)
        history = await federation.history(run_id)
        validating = await federation.start_run('selector.name="flash"')
        await federation.finished(validating)
    for row in members(federation, validating):
        for member in row:
            assert member.update is not None
            assert member.update.samples == held(member.client_id) - held(member.client_id) // 10
    for number, row in enumerate(members(federation, run_id), start=1):
        assert len(row) == 3
        for member in row:
            assert member.update is not None
            assert member.update.seconds == pytest.approx(simulated(member.client_id, number))
            assert 0 < member.update.reports["utility"] < 10 * member.update.samples
        slowest = max(m.update.seconds for m in row if m.update is not None)
        assert history[number - 1].seconds == pytest.approx(slowest)


async def test_simulated_duration_decides_which_clients_are_late(tmp_path: Path) -> None:
    """All six clients are selected for four places; three meet the deadline.

    A round that needs only two updates has them before the deadline.
    """
    in_order = sorted((simulated(f"client-{k}", 1), f"client-{k}") for k in range(CLIENTS))
    deadline = (in_order[2][0] + in_order[3][0]) / 2
    async with profile_federation(
        tmp_path,
        selector="uniform",
        clients=CLIENTS,
        count=4,
        rounds=1,
        assignments=[
            *ON,
            "round.over_selection=2",
            "round.quorum=0.1",
            f"virtual_clock.deadline_seconds={deadline}",
        ],
    ) as federation:
        run_id = await federation.start_run("expected_clients=6")
        await federation.finished(run_id)
        [missed] = await federation.history(run_id)
        enough = await federation.start_run(
            "expected_clients=6", "clients_per_round=2", "round.over_selection=4"
        )
        await federation.finished(enough)
        [kept] = await federation.history(enough)
    for number, each in ((3, run_id), (2, enough)):
        [row] = members(federation, each)
        included = {member.client_id for member in row if member.state is MemberState.INCLUDED}
        assert included == {client for _, client in in_order[:number]}
    assert missed.seconds == pytest.approx(deadline)
    assert kept.seconds == pytest.approx(in_order[1][0])


async def test_cohorts_and_durations_follow_a_trace_exactly(tmp_path: Path) -> None:
    """Four rounds, the last one in the trace's second pass.

    Round 1: three clients that train at four times the speed. Round 2 waits 1,000 s for three
    others, and client-5 leaves. Round 3: client-0 and client-5 are enough, the fourth waits for the
    trace to begin again.
    """
    deadline = 500.0
    first = max(held(f"client-{k}") for k in (0, 1, 2)) / 4
    second = first + 1000.0
    third = second + deadline
    last = third + 2.0 * held("client-0")
    spans = {
        "client-0": [TraceSpan(0, first, 4.0), TraceSpan(third, last, 0.5)],
        "client-1": [TraceSpan(0, first, 4.0)],
        "client-2": [TraceSpan(0, first, 4.0)],
        "client-3": [TraceSpan(second, third, 1.0)],
        "client-4": [TraceSpan(second, second + 100, 1.0), TraceSpan(second + 100, third, 8.0)],
        "client-5": [TraceSpan(second, second + 100, 1.0), TraceSpan(third, last, 1.0)],
    }
    (tmp_path / "trace.csv").write_text(trace_text(spans))
    async with profile_federation(
        tmp_path,
        selector="uniform",
        clients=CLIENTS,
        count=3,
        rounds=4,
        coordinator={"data_directory": str(tmp_path)},
        assignments=[
            "virtual_clock.enabled=true",
            "virtual_clock.tail_per_sample=0",
            f"virtual_clock.deadline_seconds={deadline}",
            'virtual_clock.trace="trace.csv"',
            "round.quorum=0.5",
        ],
    ) as federation:
        run_id = await federation.start_run("expected_clients=6")
        await federation.finished(run_id)
        history = await federation.history(run_id)
    states = [
        {member.client_id.removeprefix("client-"): member.state for member in row}
        for row in members(federation, run_id)
    ]
    came, late = MemberState.INCLUDED, MemberState.LATE
    assert states == [
        {"0": came, "1": came, "2": came},
        {"3": came, "4": came, "5": late},
        {"0": came, "5": came},
        {"0": came, "1": came, "2": came},
    ]
    seconds = [row.seconds for row in history]
    assert seconds == [first, 1000.0 + deadline, last - third, first]


async def test_clients_that_failed_are_selected_again_if_the_others_are_never_together(
    tmp_path: Path,
) -> None:
    """Two clients leave at once. The other four would be enough, but no two of them are ever
    available at the same time."""
    deadline = 500.0
    long = 10 * max(held(f"client-{k}") for k in range(CLIENTS))
    spans = {f"client-{k}": [TraceSpan(100.0 * k, 100.0 * k + 50, 1.0)] for k in (2, 3, 4, 5)}
    for client in ("client-0", "client-1"):
        spans[client] = [TraceSpan(0, 1, 1.0), TraceSpan(1000.0, 1000.0 + long, 1.0)]
    (tmp_path / "trace.csv").write_text(trace_text(spans))
    async with profile_federation(
        tmp_path,
        selector="uniform",
        clients=CLIENTS,
        count=2,
        rounds=1,
        coordinator={"data_directory": str(tmp_path)},
        assignments=[
            "virtual_clock.enabled=true",
            "virtual_clock.tail_per_sample=0",
            f"virtual_clock.deadline_seconds={deadline}",
            'virtual_clock.trace="trace.csv"',
            "round.quorum=1.0",
            "round.attempts=2",
        ],
    ) as federation:
        run_id = await federation.start_run("expected_clients=6")
        await federation.finished(run_id)
        [row] = await federation.history(run_id)
    assert row.seconds == pytest.approx(1000.0 + max(held("client-0"), held("client-1")))
