"""The four leaks of DC selection with secure sums, as attacks on what a real coordinator received.

Each succeeds against `protocol` and fails against `cells`. Against `noisy`, no attack learns more
than the noisy counts that clients disclosed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.label_attacks import (
    Counts,
    Received,
    by_differencing,
    by_distances,
    by_intersection,
)
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.report import Records
from potluck.client.question import QuestionContext
from potluck.client.training.questions.label_distance import LabelDistance
from potluck.common.learning.step_by_step import LABEL_DISTANCE, LEAKS
from potluck.server.store import RunState

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

CLIENTS = 10
ROUNDS = 16
RUN_FILE = """
rounds = {rounds}
clients_per_round = 7
expected_clients = 10
task = {{name = "digits", clients = 10}}
selector = {{name = "{selector}", added = 2}}
training = {{steps = 1}}
evaluation = {{every = 0}}
[profiles]
sum_mode = "exact"
disclosure = "{disclosure}"
"""
WILLING = DisclosurePolicy(
    sums=("total", "cells", "unsafe-stepwise"), exact_sums=True, simulation_seed=1
)


@dataclass
class Played:
    """A federation after a run, what its coordinator received, and the cohorts of each round."""

    federation: SumFederation
    received: Received
    cohorts: list[list[str]]

    @property
    def truth(self) -> Counts:
        names = self.federation.members.names
        return {name: self.federation.counts([name]).tolist() for name in names}


async def play(federation: SumFederation, disclosure: str, **changes: Any) -> Played:
    values = {"rounds": ROUNDS, "selector": "dc-balanced", **changes}
    row = await federation.finished(RUN_FILE.format(disclosure=disclosure, **values))
    assert row.state is RunState.FINISHED, row.reason
    rounds = await federation.coordinator.store.call(lambda store: store.rounds(row.run_id))
    cohorts = [[member.client_id for member in each.members] for each in rounds if each.members]
    return Played(federation, await Received.by(federation), cohorts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def by_protocol(
    members: Members, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Played]:
    folder = tmp_path_factory.mktemp("unsafe-stepwise")
    async with sum_federation(members, folder) as federation:
        await federation.start(disclosure=WILLING)
        yield await play(federation, "unsafe-stepwise")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def by_cells(
    members: Members, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Played]:
    folder = tmp_path_factory.mktemp("cells")
    async with sum_federation(members, folder) as federation:
        await federation.start(disclosure=WILLING)
        await play(federation, "cells", rounds=4, selector="dc-real")
        yield await play(federation, "cells", rounds=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_noise(
    members: Members, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Played]:
    folder = tmp_path_factory.mktemp("noise")
    async with sum_federation(members, folder) as federation:
        await federation.start(disclosure=WILLING)
        await play(federation, "noisy", rounds=4, selector="dc-real")
        yield await play(federation, "noisy", rounds=4)


async def test_differencing_sums_reveals_the_counts_of_each_added_client(
    by_protocol: Played,
) -> None:
    found = by_differencing(by_protocol.received)
    added = {client for cohort in by_protocol.cohorts for client in cohort[5:6]}
    assert found.keys() == added
    assert found == {client: by_protocol.truth[client] for client in added}


async def test_intersecting_random_sums_reveals_the_counts_of_all_clients(
    by_protocol: Played,
) -> None:
    sums = by_protocol.received.first
    assert all(len(clients) == 5 for clients, _ in sums)
    assert by_intersection(sums) == by_protocol.truth
    early = by_intersection(sums[:4])
    assert early == {}


async def test_label_distances_reveal_the_counts_of_unselected_clients(by_protocol: Played) -> None:
    asked = {each.client for each in by_protocol.received.told}
    found = by_distances(by_protocol.received)
    assert found == {client: by_protocol.truth[client] for client in found}
    assert len(found) >= len(asked) // 2
    # The attack used only distances that clients reported while outside of the cohort, and no sum
    # that includes them.
    assert set(found) <= asked


async def test_client_that_reports_distance_zero_is_selected_in_unsafe_mode_only(
    by_protocol: Played,
    by_cells: Played,
    with_noise: Played,
    members: Members,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar = members.names[3]
    honest = LabelDistance.answer

    def lie(question: LabelDistance, context: QuestionContext) -> Any:
        return {LABEL_DISTANCE: 0.0} if context.client == liar else honest(question, context)

    monkeypatch.setattr(LabelDistance, "answer", lie)
    played = {}
    for mode in ("unsafe-stepwise", "cells", "noisy"):
        async with sum_federation(members, tmp_path / mode) as federation:
            await federation.start(disclosure=WILLING)
            played[mode] = (await play(federation, mode, rounds=4)).cohorts
    assert all(liar in cohort for cohort in played["unsafe-stepwise"])
    assert not all(liar in cohort for cohort in by_protocol.cohorts[:4])
    # In the other modes, clients receive no question, so they can't lie.
    assert played["cells"] == by_cells.cohorts
    assert played["noisy"] == with_noise.cohorts


async def test_sums_over_cells_reveal_no_client(by_cells: Played) -> None:
    received = by_cells.received
    assert received.sums
    assert received.told == []
    assert received.profiles == {}
    assert by_differencing(received) == {}
    assert by_intersection(received.sums) == {}
    assert all(len(clients) >= 5 for clients, _ in received.sums)


async def test_noisy_mode_reveals_noisy_counts_only(with_noise: Played) -> None:
    received, truth = with_noise.received, with_noise.truth
    assert [len(clients) for clients, _ in received.sums] == [CLIENTS]
    assert received.told == []
    assert by_differencing(received) == {}
    assert by_intersection(received.sums) == {}
    assert received.profiles.keys() == truth.keys()
    noise = np.array([np.subtract(received.profiles[name], truth[name]) for name in truth])
    assert (noise != 0).any(axis=1).all()  # no disclosed counts are exact
    # The sums add only the exact total: it gives a client's counts only to a party that knows the
    # noise of the nine others.
    [(_, total)] = received.sums
    for place, name in enumerate(truth):
        others = np.sum([received.profiles[each] for each in truth if each != name], axis=0)
        assert np.subtract(total, others).tolist() != truth[name]
        apart = np.subtract(np.subtract(total, others), truth[name])
        assert apart.tolist() == (-np.delete(noise, place, axis=0).sum(axis=0)).tolist()


async def test_clients_whose_policy_refuses_are_in_no_sum(members: Members, tmp_path: Path) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:3], disclosure=WILLING)
        await federation.start(members.names[3:])
        row = await federation.coordinator.start_run(
            RUN_FILE.format(rounds=1, selector="dc-balanced", disclosure="unsafe-stepwise")
        )
        row = await federation.ended(row.run_id)
        assert row.state is RunState.FINISHED, row.reason
        stored = await federation.stored()
        assert all(each.total is None for each in stored)
        refusals = stored[0].record["refusals"]
        assert isinstance(refusals, dict)
        assert set(refusals.values()) == {"policy"}
        assert set(refusals) <= set(members.names[3:])
        for name in members.names:
            assert federation.ledger(name).of(name).uploads == []


async def test_disclosure_records_list_the_leaks_of_selection(by_protocol: Played) -> None:
    folder = by_protocol.federation.folder / "host-3"
    lines = list(Records(folder, WILLING).lines())
    assert [line.strip() for line in lines if line.strip() in LEAKS] == list(LEAKS)
