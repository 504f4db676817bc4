"""New memberships reach all hosts of a running federation, and keys change without a pause."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.federation import until
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.client.handlers.sum_participant import Count
from potluck.common.errors import IdentityError
from potluck.common.net.membership import ENDS_SOON, load_members
from potluck.common.net.membership_in_force import KEPT
from potluck.deploy.pki.federation_root import (
    create_root,
    make_next_keys,
    renew_members,
    revoke_members,
    use_next_keys,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import MessageType
from potluck.server.store import RunState

CLIENTS = 7
MASKED = f"""
secure_aggregation = true
rounds = 2
clients_per_round = 6
expected_clients = {CLIENTS}
task = {{name = "digits", clients = {CLIENTS}}}
training = {{epochs = 1}}
masking = {{stage_seconds = 20.0}}
"""


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members.make(tmp_path / "members", CLIENTS)


@pytest_asyncio.fixture
async def federation(members: Members, tmp_path: Path) -> AsyncIterator[SumFederation]:
    """Run a federation whose hosts receive their membership from the coordinator only, and sign
    with copies of the keys."""
    shutil.copytree(members.root / "members", tmp_path / "keys")
    async with sum_federation(members, tmp_path) as federation:
        await federation.start(members=None, member_key=tmp_path / "keys")
        yield federation


def newest(federation: SumFederation) -> bytes:
    return (federation.members.root / "members.json").read_bytes()


async def publish(federation: SumFederation) -> None:
    """Send the newest members.json as an operator; wait until all connected hosts have it.

    The coordinator also watches this file, and may have read it before the operator sends it.
    """
    async with federation.operator() as operator:
        await operator.install_membership(newest(federation))
    await arrived(federation)


async def arrived(federation: SumFederation) -> None:
    """Return True if all hosts have the newest members.json."""
    kept = [federation.folder / f"host-{number}" / KEPT for number in range(CLIENTS)]
    await until(lambda: all(each.exists() for each in kept))
    await until(lambda: all(each.read_bytes() == newest(federation) for each in kept))


async def test_hosts_receive_a_new_membership_from_the_coordinator(
    federation: SumFederation,
) -> None:
    outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    renew_members(federation.members.root, federation.members.names, soon=ENDS_SOON)
    await publish(federation)
    row = await federation.finished(MASKED)
    assert row.state is RunState.FINISHED, row.reason


async def test_an_older_or_foreign_membership_is_refused(
    federation: SumFederation, tmp_path: Path
) -> None:
    old = newest(federation)
    renew_members(federation.members.root, federation.members.names, soon=ENDS_SOON)
    await publish(federation)
    create_root(tmp_path / "other", federation.members.tls.name)
    async with federation.operator() as operator:
        answer = await operator.install_membership(old)
        assert not answer.taken
        with pytest.raises(IdentityError, match="not signed by the federation root"):
            await operator.install_membership((tmp_path / "other/members.json").read_bytes())


async def test_member_keys_are_replaced_between_masked_rounds(
    federation: SumFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round under way ends with the old keys, the next one has the new ones."""
    root, names = federation.members.root, federation.members.names
    for path in make_next_keys(root, names):
        target = tmp_path / "keys" / "next" / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    old = load_members(root / "members.json", root / "root.pub", federation="test")
    switched = False
    honest = SumSessions.answer

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Count) -> Any:
        nonlocal switched
        if MessageType(instruction.secure.envelope.type) is MessageType.ROSTER and not switched:
            switched = True
            use_next_keys(root, names)
            await publish(federation)
        return await honest(self, instruction, count)

    with monkeypatch.context() as patched:
        patched.setattr(SumSessions, "answer", answer)
        row = await federation.finished(MASKED)
    assert switched
    assert row.state is RunState.FINISHED, row.reason
    assert len(await federation.stored()) == 2  # no attempt was lost
    assert federation.coordinator.trust.members is not None
    found = federation.coordinator.trust.members
    assert found.epoch == old.epoch + 1
    for name in names:
        assert found.records[name].public_key != old.records[name].public_key
        assert len(federation.ledger(name).of(name).releases) >= 1


async def test_masked_round_continues_without_a_revoked_member(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, names = federation.members.root, federation.members.names
    revoked: list[str] = []
    honest = SumSessions.answer

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Count) -> Any:
        if MessageType(instruction.secure.envelope.type) is MessageType.ROSTER and not revoked:
            revoked.append(instruction.client_id)
            revoke_members(root, revoked)
            await publish(federation)
        return await honest(self, instruction, count)

    with monkeypatch.context() as patched:
        patched.setattr(SumSessions, "answer", answer)
        row = await federation.finished(MASKED)
    assert row.state is RunState.FINISHED, row.reason
    assert not federation.has_released(revoked[0])
    others = [name for name in names if name != revoked[0]]
    for name in others:
        await until(partial(federation.has_released, name))
        for release in federation.ledger(name).of(name).releases:
            assert revoked[0] not in release.clients
    outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == others  # the revoked member is not invited


async def test_secure_sum_is_repeated_without_a_member_revoked_meanwhile(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = federation.members.names
    honest = SumSessions.answer
    revoked = False

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Count) -> Any:
        nonlocal revoked
        if MessageType(instruction.secure.envelope.type) is MessageType.DELIVERY and not revoked:
            revoked = True
            revoke_members(federation.members.root, ["client-3"])
            await publish(federation)
        return await honest(self, instruction, count)

    with monkeypatch.context() as patched:
        patched.setattr(SumSessions, "answer", answer)
        outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == [name for name in names if name != "client-3"]
