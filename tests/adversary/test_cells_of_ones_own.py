"""A coordinator that tries to choose which clients are summed together.

Cells are consecutive parts of a ring of hosts. If a coordinator could choose their size, it could
request sums over cells of seven and of eight hosts. These cells end at different hosts, so the
differences of sums reveal the inputs of the few hosts in between.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from adversary.conftest import Scene, attacked
from support.sum_federation import EXACT, Members, host_of

from potluck.common.disclosure import SumKind
from potluck.secagg.protocol import Rule
from potluck.secagg.protocol.primitives.cells import cells_of_members

CLIENTS = 14
MANY = 35


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members.make(tmp_path_factory.mktemp("members"), CLIENTS)


def cells(members: Members, least: int) -> list[tuple[str, ...]]:
    """Return the cells that clients draw for a policy's minimum number of hosts."""
    hosts = {name: host_of(name) for name in members.names}
    return cells_of_members(hosts, members.tls.name, data_epoch=1, least_hosts=least)


def test_cells_of_freely_chosen_sizes_would_isolate_a_host() -> None:
    """If the header set the size of cells, cells of 7 and of 8 among 35 hosts would isolate a
    host."""
    hosts = {f"client-{number}": f"host-{number}" for number in range(MANY)}
    cuts = set()
    for least in range(5, MANY + 1):
        drawn = cells_of_members(hosts, "f", data_epoch=1, least_hosts=least)
        sizes = [len(cell) for cell in drawn]
        cuts |= {sum(sizes[:end]) for end in range(len(sizes) + 1)}
    assert min(after - before for before, after in pairwise(sorted(cuts))) == 1


async def test_header_does_not_change_the_cells_of_clients(
    members: Members, tmp_path: Path
) -> None:
    [everybody] = cells(members, 8)
    assert len(everybody) == CLIENTS
    async with attacked(members, tmp_path, disclosure=EXACT) as scene:
        for epsilon in (None, 0.5):
            outcome = await scene.federation.sum(
                everybody, kind=SumKind.CELLS, least_hosts=8, epsilon=epsilon
            )
            assert outcome.total is None
            assert set(outcome.record.refusals.values()) == {Rule.SET}
            assert "clients outside this client's cell" in outcome.explain()
        # The coordinator may require more hosts of a cell than clients do; the cell stays the same.
        for cell in cells(members, 5):
            outcome = await scene.federation.sum(cell, kind=SumKind.CELLS, least_hosts=7)
            assert outcome.total is not None, outcome.explain()
            assert sorted(outcome.record.clients) == sorted(cell)


async def test_sums_without_noise_are_refused_by_default(scene: Scene) -> None:
    everybody = scene.federation.members.names
    for kind in (SumKind.TOTAL, SumKind.CELLS):
        outcome = await scene.federation.sum(everybody, kind=kind)
        assert outcome.total is None
        assert set(outcome.record.refusals.values()) == {Rule.POLICY}
        assert "owner does not allow exact_sums" in outcome.explain()


async def test_noise_costs_budget_until_it_is_spent(scene: Scene) -> None:
    """Repeated sums are refused once the owners' budget of ε = 4 is spent."""
    for _ in range(4):
        assert (await scene.federation.sum(epsilon=1.0)).total is not None
    outcome = await scene.federation.sum(epsilon=1.0)
    assert outcome.total is None
    assert set(outcome.record.refusals.values()) == {Rule.BUDGET}
    for client in scene.federation.members.names:
        assert scene.federation.ledger(client).of(client).spent == Fraction(4)
