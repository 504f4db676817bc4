"""A coordinator that adds noise, killed between the charge of a sum and the commit of its round."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.federation import Federation, crash_federation, until

from potluck.common.records.privacy_loss import ALL_RUNS_BUDGET_SPENT, RUN_BUDGET_SPENT
from potluck.privacy.coordinator.round_ledger import RoundLedger
from potluck.rpc.v1 import operator_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
INCLUDED = operator_pb2.MEMBER_STATE_INCLUDED
NOISE = ("privacy.unit=client", "privacy.noise=coordinator", "privacy.clip=0.5")
LIMIT_OF_ALL_RUNS = 1000.0
"""Maximum ε over all runs: it allows all runs of this module except the last."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Federation]:
    settings = {"epsilon_over_runs": LIMIT_OF_ALL_RUNS}
    folder = tmp_path_factory.mktemp("noised")
    async with crash_federation(folder, coordinator=settings) as federation:
        yield federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    shared.points.clear()
    return shared


def charged(federation: Federation, run_id: str) -> list[tuple[int, int]]:
    """Return the round and the attempt of each charged sum."""
    found = RoundLedger(federation.state, run_id).rounds()
    return [(each.round, each.attempt) for each in found]


async def included(federation: Federation, run_id: str) -> Counter[str]:
    """Return the number of committed rounds that include each client."""
    history = await federation.history(run_id)
    members = [member for entry in history for member in entry.members]
    return Counter(each.client_id for each in members if each.state == INCLUDED)


@pytest.mark.parametrize(
    "point",
    [
        "weigh",  # the sum is charged, its noise is not drawn
        "apply",  # noise is drawn, the model is not on disk
        "evaluate",  # the model is on disk
        "observe",  # the round is about to be committed
    ],
)
async def test_coordinator_killed_between_charge_and_commit_charges_again(
    federation: Federation, point: str
) -> None:
    federation.points.kill(point)
    run_id = await federation.start_run(
        *NOISE, "privacy.noise_multiplier=1.5", "privacy.clip_quantile=0.5"
    )
    assert await federation.coordinator.ended() == 137
    assert charged(federation, run_id) == [(1, 1)]
    await federation.restart_coordinator()
    await federation.finished(run_id)
    assert charged(federation, run_id) == [(1, 1), (1, 1), (2, 1), (3, 1)]
    ledger = RoundLedger(federation.state, run_id)
    used = await included(federation, run_id)
    for client in ledger.clients():
        assert sum(ledger.events_of(client).values()) >= used[client]
    clips = [each.clip for each in ledger.rounds()]
    assert clips[0] == clips[1] == 0.5
    assert len(set(clips)) == 3, "each committed round adapts the bound of the next"
    assert all(loss > 0 for loss in RoundLedger(federation.state, run_id).spent(1e-5).values())


async def test_resumed_run_excludes_clients_at_their_privacy_limit(federation: Federation) -> None:
    federation.points.kill("observe")
    run_id = await federation.start_run(*NOISE, "privacy.epsilon=4", "privacy.trainings=1")
    assert await federation.coordinator.ended() == 137
    [first] = RoundLedger(federation.state, run_id).rounds()
    await federation.restart_coordinator()
    # Two of six clients still have budget, and the quorum is two of a cohort of four.
    await federation.until_committed(run_id, 1)
    [again] = [e for e in RoundLedger(federation.state, run_id).rounds() if e != first]
    assert not set(first.clients) & set(again.clients)
    assert set(await included(federation, run_id)) == set(again.clients)
    status = await federation.ended(run_id)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert f"{RUN_BUDGET_SPENT} (ε ≤ 4, trainings charged: 1)" in status.reason


async def test_repeated_round_excludes_clients_at_their_privacy_limit(
    federation: Federation,
) -> None:
    federation.points.hold("observe")
    run_id = await federation.start_run(
        *NOISE, "privacy.epsilon=4", "privacy.trainings=2", "rounds=2", "round.quorum=0.25"
    )
    await until(lambda: federation.points.reached("observe"))
    federation.points.kill("weigh")
    federation.points.release()
    assert await federation.coordinator.ended() == 137  # killed in round 2
    await federation.restart_coordinator()
    await federation.finished(run_id)
    first, second, again = RoundLedger(federation.state, run_id).rounds()
    # At least two: two cohorts of four among six clients.
    spent = set(first.clients) & set(second.clients)
    assert set(again.clients) == set(second.clients) - spent
    used = await included(federation, run_id)
    assert used == Counter([*first.clients, *again.clients])
    loss = RoundLedger(federation.state, run_id).spent(1e-5)
    assert max(loss.values()) <= 4.0


async def test_new_run_excludes_clients_at_the_limit_over_all_runs(federation: Federation) -> None:
    much = (*NOISE, "privacy.noise_multiplier=0.03", "rounds=1", "clients_per_round=6")
    first = await federation.start_run(*much)
    await federation.finished(first)
    assert 500 < max(RoundLedger(federation.state, first).spent(1e-5).values()) < LIMIT_OF_ALL_RUNS
    await federation.kill_coordinator()
    await federation.restart_coordinator()
    second = await federation.start_run(*much, "name=renamed")
    status = await federation.ended(second)
    assert status.state == operator_pb2.RUN_STATE_FAILED
    assert f"{ALL_RUNS_BUDGET_SPENT} (ε ≤ 1000" in status.reason
    assert not RoundLedger(federation.state, second).rounds()
