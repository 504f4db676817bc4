"""Totals and cell sums with the default noise: each is charged once and then reused.

Hosts use the default `[disclosure]` settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.sum_federation import EXACT, Members, SumFederation, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.server.store import RunRow, RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 10
AS_IT_COMES = DisclosurePolicy()
SUM, COUNTS = Fraction(1, 2), Fraction(1)
"""The ε of a noisy sum and of noisy counts."""


@pytest.fixture
def said() -> Iterator[list[Any]]:
    with capture_logs() as logs:
        yield logs


async def played(
    federation: SumFederation,
    *profiles: str,
    clients: int = CLIENTS,
    selector: str = '"dc-real", added = 1',
) -> RunRow:
    """Run one round over `clients` clients, with these lines in the table `profiles`."""
    lines = [
        "rounds = 1",
        "clients_per_round = 3",
        f"expected_clients = {clients}",
        f'task = {{name = "digits", clients = {CLIENTS}}}',
        f"selector = {{name = {selector}}}",
        "training = {steps = 1}",
        "[profiles]",
        *profiles,
    ]
    return await federation.finished("\n".join(lines))


def spent(federation: SumFederation) -> set[Fraction]:
    """Return the ε that clients have spent on sums."""
    return {federation.ledger(name).of(name).spent for name in federation.members.names}


def texts(said: list[Any]) -> str:
    return "\n".join(each["event"] for each in said)


async def test_noisy_total_is_reused_and_charged_once(members: Members, tmp_path: Path) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=AS_IT_COMES)
        exhaustive = '"dc-exhaustive", added = 1, target'
        row = await played(federation, selector=f'{exhaustive} = "balanced"')
        assert (row.state, await federation.stored()) == (RunState.FINISHED, []), row.reason
        for selector in (f'{exhaustive} = "real"', '"dc-real", added = 1', '"dc-real", added = 1'):
            row = await played(federation, selector=selector)
            assert row.state is RunState.FINISHED, row.reason
        [stored] = await federation.stored()
        assert stored.record["epsilon"] == 0.5
        assert stored.total is not None
        apart = np.subtract(stored.total, federation.counts(members.names))
        assert 0 < np.abs(apart).max() < 500
        assert spent(federation) == {SUM}


async def test_noisy_cell_sums_are_reused_and_charged_once(
    members: Members, tmp_path: Path
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=AS_IT_COMES)
        for selector in ('"dc-balanced", added = 1', '"fedentopt"', '"kl"'):
            row = await played(federation, 'disclosure = "cells"', selector=selector)
            assert row.state is RunState.FINISHED, row.reason
        assert {each.record["epsilon"] for each in await federation.stored()} == {0.5}
        assert spent(federation) == {SUM}
        assert all(federation.disclosed(name) == [] for name in members.names)


async def test_exact_sums_need_the_permission_of_owners(
    members: Members, tmp_path: Path, said: list[Any]
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=AS_IT_COMES)
        row = await played(federation, 'sum_mode = "exact"')
        assert row.state is RunState.FINISHED, row.reason  # the selector uses the noisy counts
        assert "the selector's target is the sum of noisy counts" in texts(said)
        assert "owner does not allow exact_sums" in texts(said)
        row = await played(federation, 'sum_mode = "exact"', 'disclosure = "cells"')
        assert row.state is RunState.FAILED
        assert all(each.total is None for each in await federation.stored())
        assert all(not federation.ledger(name).of(name).uploads for name in members.names)


async def test_run_without_privacy_budget_continues_without_a_sum_and_warns(
    members: Members, tmp_path: Path, said: list[Any]
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=DisclosurePolicy(epsilon_budget=float(COUNTS)))
        row = await played(federation, selector='"fedentopt"')
        assert row.state is RunState.FINISHED, row.reason
        row = await played(federation)
        assert row.state is RunState.FINISHED, row.reason
        assert "the selector's target is the sum of noisy counts" in texts(said)
        assert "and 9 more refused (budget)" in texts(said)
        assert (
            "the sum costs ε = 0.5, but of epsilon_budget = 0 only 0 is left; the data owner"
            in texts(said)
        )
        assert spent(federation) == {0}


async def test_exact_total_is_reused_when_more_clients_are_connected(
    members: Members, tmp_path: Path, said: list[Any]
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:5], disclosure=EXACT)
        row = await played(federation, 'sum_mode = "exact"', clients=5)
        assert row.state is RunState.FINISHED, row.reason
        await federation.start(members.names[5:], disclosure=EXACT)
        for mode in ("exact", "noisy"):
            row = await played(federation, f'sum_mode = "{mode}"')
            assert row.state is RunState.FINISHED, row.reason
        [stored] = await federation.stored()
        assert stored.total == tuple(federation.counts(members.names[:5]).tolist())
        late = "the selector's target does not include client-5, client-6, client-7 and 2 more"
        assert texts(said).count(late) == 2  # one notice in each run


async def test_noisy_total_is_repeated_if_it_lacks_most_clients(
    members: Members, tmp_path: Path
) -> None:
    small = DisclosurePolicy(sum_hosts=4)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:4], disclosure=small)
        assert (await played(federation, "sum_hosts = 4", clients=4)).state is RunState.FINISHED
        await federation.start(members.names[4:8], disclosure=small)
        assert (await played(federation, "sum_hosts = 4", clients=8)).state is RunState.FINISHED
        assert len(await federation.stored()) == 1  # reused: it includes half of the clients
        await federation.start(members.names[8:], disclosure=small)
        assert (await played(federation, "sum_hosts = 4")).state is RunState.FINISHED
        _, stored = await federation.stored()
        assert sorted(stored.record["clients"]) == members.names  # type: ignore[call-overload]
        assert spent(federation) == {SUM, 2 * SUM}


async def test_run_with_a_larger_epsilon_gets_a_new_sum(members: Members, tmp_path: Path) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(disclosure=AS_IT_COMES)
        for epsilon in (0.5, 1.0, 0.25):  # the last run reuses a sum
            assert (await played(federation, f"sum_epsilon = {epsilon}")).state is RunState.FINISHED
        found = [each.record["epsilon"] for each in await federation.stored()]
        assert found == [0.5, 1.0]
        assert spent(federation) == {Fraction(3, 2)}


async def test_simulation_seed_determines_the_noise(members: Members, tmp_path: Path) -> None:
    totals: list[list[int]] = []
    for seed in (1, 1, 2):
        folder = tmp_path / str(len(totals))
        async with sum_federation(members, folder) as federation:
            await federation.start(disclosure=DisclosurePolicy(simulation_seed=seed))
            outcome = await federation.sum(epsilon=0.1)
            assert outcome.total is not None, outcome.explain()
            totals.append(outcome.total.tolist())
    assert totals[0] == totals[1] != totals[2]
