"""Secure sums over real gRPC: real client agents, each on a host of its own, and a coordinator."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.federation import until
from support.sum_federation import (
    Members,
    SumFederation,
    holding,
    host_of,
    silent,
    sum_federation,
)

from potluck.client.disclosure.disclosure_policy import DisclosurePolicy
from potluck.client.disclosure.report import Records
from potluck.common.disclosure import SumKind
from potluck.common.errors import RunError
from potluck.deploy.commands.disclosure_audit_command import audit
from potluck.deploy.pki.federation_root import add_members, create_root
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import MessageType
from potluck.secagg.protocol.primitives.cells import cells_of_members
from potluck.server.store import RunState

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 10
RUN_FILE = """
rounds = 1
clients_per_round = 3
expected_clients = 10
task = {name = "digits", clients = 10}
selector = {name = "dc-real", added = 1}
training = {steps = 1}
[profiles]
sum_mode = "exact"
"""
BY_CELL = RUN_FILE + 'disclosure = "cells"\n'


@pytest_asyncio.fixture(loop_scope="module")
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        yield federation


async def test_ten_clients_sum_exactly_and_record_the_release(federation: SumFederation) -> None:
    outcome = await federation.sum()
    assert outcome.total is not None
    assert outcome.total.tolist() == federation.counts(federation.members.names).tolist()
    assert outcome.record.hosts == CLIENTS
    [stored] = await federation.stored()
    assert stored.total == tuple(outcome.total.tolist())
    for client in federation.members.names:
        # The coordinator needs the shares of seven clients only; the other clients release theirs
        # later.
        await until(partial(federation.has_released, client))
        ledger = federation.ledger(client).of(client)
        [release] = ledger.releases
        assert release.session_id == outcome.record.session_id
        assert sorted(release.clients) == federation.members.names
    again = await federation.sum()  # the identical set may be summed again
    assert again.total is not None
    assert again.record.session_id != outcome.record.session_id


@pytest.mark.parametrize(
    ("stage", "counted"),
    [
        (MessageType.INVITATION, False),
        (MessageType.ROSTER, False),
        (MessageType.DELIVERY, False),
        (MessageType.SURVIVORS, True),
        (MessageType.CERTIFICATE, True),
    ],
)
async def test_clients_silent_before_their_upload_are_excluded_and_after_it_counted(
    federation: SumFederation, stage: MessageType, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = ["client-3", "client-7"]
    with silent(monkeypatch, dict.fromkeys(quiet, stage)):
        outcome = await federation.sum()
    names = [name for name in federation.members.names if counted or name not in quiet]
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == names
    assert np.array_equal(outcome.total, federation.counts(names))


async def test_second_run_reuses_the_stored_sum(federation: SumFederation) -> None:
    names = federation.members.names
    for _ in range(2):
        row = await federation.finished(RUN_FILE)
        assert row.state is RunState.FINISHED, row.reason
    [stored] = await federation.stored()  # the second run reuses the sum
    assert stored.total == tuple(federation.counts(names).tolist())


async def test_run_continues_without_a_sum_if_too_few_hosts_are_connected(
    members: Members, tmp_path: Path
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:4])
        with pytest.raises(RunError, match="4 clients on 4 hosts are connected"):
            await federation.sum()
        row = await federation.finished(
            RUN_FILE.replace("expected_clients = 10", "expected_clients = 4")
        )
        assert row.state is RunState.FINISHED, row.reason
        assert await federation.stored() == []


@pytest.mark.parametrize(
    ("terms", "disclosure", "rule"),
    [
        ({}, {"sum_hosts": 8}, "policy"),
        ({}, {"sum_colluding_hosts": 4}, "policy"),
        ({}, {"sums": []}, "policy"),
        ({}, {"exact_sums": False}, "policy"),
        ({"epsilon": 0.5}, {"epsilon_budget": 0.25}, "budget"),
    ],
)
async def test_clients_refuse_sums_weaker_than_their_policy_and_name_the_rule(
    members: Members, tmp_path: Path, terms: Any, disclosure: Any, rule: str
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        policy = DisclosurePolicy(**{"exact_sums": True, **disclosure})
        await federation.start(members.names[:6], disclosure=policy)
        outcome = await federation.sum(members.names[:6], **terms)
        assert outcome.total is None
        assert set(outcome.record.refusals.values()) == {rule}
        assert f"refused ({rule})" in outcome.explain()
        for client in members.names[:6]:
            assert federation.ledger(client).of(client).uploads == []


async def test_all_clients_refuse_sums_with_invalid_terms(
    federation: SumFederation,
) -> None:
    names = federation.members.names
    refused: list[tuple[dict[str, Any], str]] = [
        ({"classes": 11}, "input"),
        ({"least_hosts": 4}, "policy"),
        ({"epsilon": 2.0}, "policy"),
    ]
    for terms, rule in refused:
        outcome = await federation.sum(**terms)
        assert outcome.total is None
        assert outcome.record.refusals == dict.fromkeys(names, rule)


async def test_client_refuses_to_send_a_count_above_the_bound(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = federation.members.names
    counts = {name: [1] * 10 for name in names}
    counts["client-4"] = [1] * 9 + [2**40 + 1]
    with holding(monkeypatch, counts):
        outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    assert outcome.total.tolist() == [len(names) - 1] * 10
    assert outcome.record.refusals == {"client-4": "input"}


async def test_coordinator_refuses_masked_counts_of_the_wrong_length(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = SumSessions.answer

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Any) -> Any:
        reply = await honest(self, instruction, count)
        if instruction.client_id == "client-4" and reply.masked:
            reply.masked += bytes(8)
        return reply

    monkeypatch.setattr(SumSessions, "answer", answer)
    outcome = await federation.sum()
    names = [name for name in federation.members.names if name != "client-4"]
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == names
    assert outcome.total.tolist() == federation.counts(names).tolist()
    assert outcome.troubles == {"client-4": "the client sent 88 masked bytes, not 80"}


async def test_coordinator_refuses_a_member_of_another_root(
    members: Members, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    create_root(own, members.tls.name)
    add_members(own, ["client-9"], "host-9")
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:9])
        await federation.start(
            ["client-9"],
            members=own / "members.json",
            member_key=own / "members",
            federation_root=own / "root.pub",
        )
        outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == members.names[:9]
    assert outcome.record.refusals == {"client-9": "membership"}


async def test_distributed_noise_is_charged_to_each_client(
    federation: SumFederation,
) -> None:
    names = federation.members.names
    outcome = await federation.sum(epsilon=0.5)
    assert outcome.total is not None
    # With ε = 0.5, noise is about 2.
    assert np.abs(outcome.total - federation.counts(names)).max() < 500
    assert outcome.record.epsilon == 0.5
    for client in names:
        assert federation.ledger(client).of(client).spent == Fraction(1, 2)


async def test_restarted_coordinator_repeats_the_sum_with_new_keys(
    members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with contextlib.AsyncExitStack() as hosts:
        with silent(monkeypatch, dict.fromkeys(members.names, MessageType.SURVIVORS)):
            async with sum_federation(members, tmp_path) as before:
                port = before.port
                for name in members.names:
                    await hosts.enter_async_context(members.host(name, port, tmp_path))
                await before.coordinator.start_run(RUN_FILE)
                await until(
                    lambda: all(before.ledger(name).of(name).uploads for name in members.names)
                )
        async with sum_federation(members, tmp_path, port=port) as after:
            [row] = await after.coordinator.store.call(lambda store: store.runs())
            row = await after.ended(row.run_id)
            assert row.state is RunState.FINISHED, row.reason
            [stored] = await after.stored()
            assert stored.total == tuple(after.counts(members.names).tolist())
        for name in members.names:
            sessions = {each.session_id for each in after.ledger(name).of(name).uploads}
            assert len(sessions) == 2


async def test_sums_whose_difference_reveals_a_client_are_refused(
    federation: SumFederation,
) -> None:
    names = federation.members.names
    assert (await federation.sum()).total is not None
    for name in names:
        await until(partial(federation.has_released, name))
    without_one = await federation.sum(names[1:])
    assert without_one.total is None
    assert set(without_one.record.refusals.values()) == {"released"}
    half = await federation.sum(names[:5])  # a sum over half of the clients is refused, too
    assert half.total is None
    assert (await federation.sum()).total is not None


async def test_selection_by_cells_receives_sums_over_cells_only(tmp_path: Path) -> None:
    members = Members.make(tmp_path / "members", 14)
    run_file = BY_CELL.replace("10", "14")
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        for selector in ('"dc-real", added = 1', '"fedentopt"', '"kl"'):
            row = await federation.finished(run_file.replace('"dc-real", added = 1', selector))
            assert row.state is RunState.FINISHED, row.reason
        stored = await federation.stored()  # later runs reuse the sums
        cells = [sorted(each.record["clients"]) for each in stored]  # type: ignore[call-overload]
        assert [len(cell) for cell in cells] == [7, 7]
        assert sorted(client for cell in cells for client in cell) == sorted(members.names)
        for each, cell in zip(stored, cells, strict=True):
            assert each.kind == "cells"
            assert each.total == tuple(federation.counts(cell).tolist())
        assert await federation.coordinator.store.call(lambda store: store.profiles()) == []
        for name in members.names:
            assert federation.disclosed(name) == []
            await until(partial(federation.has_released, name))
        # No combination of the released sums gives a single client's counts, and clients refuse a
        # sum that would.
        known = np.array([[name in cell for name in members.names] for cell in cells], float)
        for alone in np.eye(len(members.names)):
            assert np.linalg.matrix_rank(np.vstack([known, alone])) == len(cells) + 1
        nested = await federation.sum(cells[0][1:], kind=SumKind.CELLS)
        assert nested.total is None
        assert set(nested.record.refusals.values()) == {"released"}
        # A coordinator can't choose the members of a cell: each client draws its cell itself.
        mixed = await federation.sum([*cells[0][:4], *cells[1][:3]], kind=SumKind.CELLS)
        assert mixed.total is None
        assert set(mixed.record.refusals.values()) == {"set"}


async def test_run_fails_if_no_cell_can_be_summed(members: Members, tmp_path: Path) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:4])
        row = await federation.finished(
            BY_CELL.replace("expected_clients = 10", "expected_clients = 4")
        )
        assert row.state is RunState.FAILED
        assert "the sum failed for every cell of these clients" in row.reason


async def test_cells_wait_for_their_members_and_stay_the_same(tmp_path: Path) -> None:
    members = Members.make(tmp_path / "members", 14)
    hosts = {name: host_of(name) for name in members.names}
    drawn = cells_of_members(hosts, members.tls.name, data_epoch=1, least_hosts=5)
    first, second = (list(cell) for cell in drawn)
    here = [*first, *second[:4]]
    run_file = BY_CELL.replace("expected_clients = 10", f"expected_clients = {len(here)}").replace(
        "= 10}", "= 14}"
    )
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(here)
        row = await federation.finished(run_file)
        assert row.state is RunState.FINISHED, row.reason
        [stored] = await federation.stored()
        assert sorted(stored.record["clients"]) == sorted(first)  # type: ignore[call-overload]
        await federation.start(second[4:6])
        row = await federation.finished(run_file)
        assert row.state is RunState.FINISHED, row.reason
        _, stored = await federation.stored()
        assert sorted(stored.record["clients"]) == sorted(second[:6])  # type: ignore[call-overload]


async def test_owners_and_operators_can_list_the_clients_of_each_sum(
    members: Members, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members.names[:9])
        unwilling = DisclosurePolicy(sums=())
        await federation.start(members.names[9:], disclosure=unwilling)
        row = await federation.finished(RUN_FILE)
        for name in members.names[:9]:
            await until(partial(federation.has_released, name))
        async with federation.operator() as operator:
            capsys.readouterr()
            await audit(operator, row.run_id, as_json=True)
            found = json.loads(capsys.readouterr().out)
            await audit(operator, row.run_id)
            shown = capsys.readouterr().out
    [summed] = found["sums"]
    assert summed["released"]
    assert sorted(summed["clients"]) == members.names[:9]
    assert summed["hosts"] == 9
    assert summed["refusals"] == {"client-9": "policy"}
    assert "honest-but-curious" in found["sums_hold_against"]
    assert len(found["profiles"]) == 10
    assert "released; refused by client-9: policy" in " ".join(shown.split())
    assert "honest-but-curious" in shown
    [client] = json.loads(Records(tmp_path / "host-3", DisclosurePolicy()).values())["clients"]
    assert client["client"] == "client-3"
    assert client["sums"][0]["run"] == row.run_id
    assert sorted(client["sums"][0]["clients"]) == members.names[:9]
    lines = list(Records(tmp_path / "host-3", DisclosurePolicy(), independent=True).lines())
    assert any("in a sum with 8 other clients, 9 hosts in all" in line for line in lines)
    assert lines[-1] == "sums hide the clients' own counts from a coordinator that lies"


@pytest.mark.slow
async def test_fifty_clients_sum_a_hundred_classes_though_five_drop_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members.make(tmp_path / "members", 50)
    draws = np.random.Generator(np.random.PCG64(50)).integers(0, 1 << 30, (50, 100))
    counts = dict(zip(members.names, draws.tolist(), strict=True))
    stages = [MessageType.INVITATION, MessageType.ROSTER, MessageType.DELIVERY]
    quiet = dict(zip(members.names[::10], [*stages, *stages], strict=False))
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        with holding(monkeypatch, counts), silent(monkeypatch, quiet):
            outcome = await federation.sum(classes=100, stage_seconds=20.0)
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == sorted(set(members.names) - set(quiet))
    assert (
        outcome.total.tolist()
        == np.sum([counts[name] for name in outcome.record.clients], axis=0).tolist()
    )
