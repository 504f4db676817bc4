"""Memberships that are outdated, unsigned, or different from client to client.

When a member record was valid for ten years and could not be revoked, a holder of a member's key
was in sums for good. A coordinator could also show different members to each group of clients.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from adversary.conftest import CLIENTS, Scene, attacked
from adversary.proxy import Script
from structlog.testing import capture_logs
from support.federation import until
from support.sum_federation import Members

from potluck.common.net.membership import (
    ENDS_SOON,
    MembershipDocument,
    SignedMembership,
    load_members,
    load_private_key,
    read_membership,
)
from potluck.common.net.membership import Members as MembersOfEpoch
from potluck.common.net.membership_in_force import KEPT
from potluck.deploy.pki.federation_root import create_root, renew_members, revoke_members
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.coordinator.counts import SumOutcome
from potluck.secagg.protocol import Envelope, MessageType, decode, encode
from potluck.secagg.protocol.wire.messages import Header, Invitation, RosterMessage

MEMBERSHIP = "membership"


@pytest.fixture
def own(tmp_path: Path) -> Members:
    """Return members for one test alone, since the test changes them."""
    return Members.make(tmp_path / "members", CLIENTS)


@pytest_asyncio.fixture
async def dependent(own: Members, tmp_path: Path) -> AsyncIterator[Scene]:
    """Run a federation whose hosts get their membership from the coordinator only."""
    shutil.copytree(own.root / "members", tmp_path / "keys")
    async with attacked(own, tmp_path, members=None, member_key=tmp_path / "keys") as scene:
        await arrived(scene)
        yield scene


class OtherHeaders(Script):
    """Changes invitations to some hosts so that they name another membership."""

    def __init__(self, members: MembersOfEpoch, hosts: Callable[[str], bool]) -> None:
        self._members = members
        self._hosts = hosts

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        step = message.instruction.secure
        if self._hosts(host) and step.envelope.type == int(MessageType.INVITATION):
            envelope = decode(Envelope, step.envelope.SerializeToString(deterministic=True))
            invitation = decode(Invitation, envelope.payload)
            header = replace(
                decode(Header, invitation.header),
                membership_epoch=self._members.epoch,
                membership_sha256=self._members.digest,
            )
            forged = replace(envelope, payload=encode(replace(invitation, header=encode(header))))
            step.envelope.CopyFrom(wire.SecureEnvelope.FromString(encode(forged)))
        return [message]


class HeldBack(Script):
    """Withholds newer memberships from some hosts."""

    def __init__(self, hosts: Callable[[str], bool]) -> None:
        self._hosts = hosts

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.WhichOneof("message") == "membership" and self._hosts(host):
            return []
        return [message]


def everybody(_: str) -> bool:
    return True


def kept(scene: Scene, host: str) -> bytes:
    return (scene.federation.folder / host / KEPT).read_bytes()


def published(scene: Scene) -> bytes:
    return (scene.federation.members.root / "members.json").read_bytes()


def in_force(members: Members) -> MembersOfEpoch:
    root = members.root
    return load_members(root / "members.json", root / "root.pub", federation=members.tls.name)


async def send(scene: Scene, *, reaches: Callable[[str], bool] = everybody) -> None:
    """Send the newest members.json to the coordinator, as its operator does."""
    async with scene.federation.operator() as operator:
        await operator.install_membership(published(scene))
    await arrived(scene, reaches)


async def arrived(scene: Scene, reaches: Callable[[str], bool] = everybody) -> None:
    """Wait until these hosts have the newest members.json."""
    hosts = [f"host-{number}" for number in range(CLIENTS) if reaches(f"host-{number}")]
    await until(lambda: all((scene.federation.folder / each / KEPT).exists() for each in hosts))
    await until(lambda: all(kept(scene, each) == published(scene) for each in hosts))


def refusals(outcome: SumOutcome) -> dict[str, str]:
    """Return the rule by which each client refused; assert that the sum failed."""
    assert outcome.total is None
    return dict(outcome.record.refusals)


async def test_honest_membership_change_passes_through_the_attack_proxy(dependent: Scene) -> None:
    root, names = dependent.federation.members.root, dependent.federation.members.names
    renew_members(root, names, soon=ENDS_SOON)
    await send(dependent)
    outcome = await dependent.federation.sum()
    assert outcome.total is not None, outcome.explain()


async def test_replayed_old_membership_is_refused(dependent: Scene) -> None:
    """The old membership contains a revoked member whose key the coordinator has."""
    federation = dependent.federation
    before = in_force(federation.members)
    revoke_members(federation.members.root, ["client-5"])
    await send(dependent)
    dependent.liar.script = OtherHeaders(before, everybody)
    others = federation.members.names[:5]
    outcome = await federation.sum(others)
    assert refusals(outcome) == dict.fromkeys(others, MEMBERSHIP)
    assert not any(map(federation.has_released, others))


async def test_sum_over_two_groups_with_different_memberships_is_refused(dependent: Scene) -> None:
    """One group has the newest membership, the other an older one; no sum covers both."""
    federation = dependent.federation
    before = in_force(federation.members)

    def dark(host: str) -> bool:
        return host in ("host-0", "host-1", "host-2")

    dependent.liar.script = HeldBack(dark)
    revoke_members(federation.members.root, ["client-5"])
    await send(dependent, reaches=lambda host: not dark(host))
    five = federation.members.names[:5]
    outcome = await federation.sum(five)
    assert refusals(outcome) == dict.fromkeys(["client-0", "client-1", "client-2"], MEMBERSHIP)

    class Both(HeldBack):
        """Each group is invited under the membership that it knows: their headers differ."""

        def __init__(self) -> None:
            super().__init__(dark)
            self._old = OtherHeaders(before, dark)

        def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
            return self._old.to_host(host, message)

    dependent.liar.script = Both()
    outcome = await federation.sum(five)
    assert outcome.total is None
    assert not any(map(federation.has_released, five))


async def test_a_revoked_member_in_a_roster_is_refused(dependent: Scene) -> None:
    """The coordinator adds the advert that the revoked member signs for it."""
    federation = dependent.federation
    adverts: list[wire.SecureEnvelope] = []

    class Added(Script):
        def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
            step = message.instruction.secure
            if step.envelope.type == int(MessageType.ROSTER) and adverts:
                envelope = decode(Envelope, step.envelope.SerializeToString(deterministic=True))
                roster = decode(RosterMessage, envelope.payload)
                added = decode(Envelope, adverts[0].SerializeToString(deterministic=True))
                roster = replace(roster, adverts=(*roster.adverts, added))
                envelope = replace(envelope, payload=encode(roster))
                step.envelope.CopyFrom(wire.SecureEnvelope.FromString(encode(envelope)))
            return [message]

    def heard() -> None:
        for host, message in dependent.liar.said:
            for envelope in message.answer.secure.envelopes:
                if host == "host-5" and envelope.type == int(MessageType.ADVERT):
                    adverts.append(envelope)

    assert (await federation.sum()).total is not None
    heard()
    assert adverts
    revoke_members(federation.members.root, ["client-5"])
    await send(dependent)
    dependent.liar.script = Added()
    outcome = await federation.sum(federation.members.names[:5], subject="again")
    assert set(refusals(outcome).values()) == {"member"}


def ten_years(members: Members) -> bytes:
    """Return the next epoch, with a record that is valid for ten years, signed by the root
    itself."""
    document = read_membership(members.root / "members.json")
    first, *others = document.members
    long = first.model_copy(update={"not_after": first.not_before + timedelta(days=3650)})
    made = MembershipDocument.model_construct(
        federation=document.federation,
        epoch=document.epoch + 1,
        members=(long, *others),
        revoked=(),
    )
    root = load_private_key(members.root / "root.key")
    signed = SignedMembership.model_construct(
        document=made, signature=root.sign(made.statement()).hex()
    )
    return signed.to_bytes()


def foreign(members: Members) -> bytes:
    """Return the next epoch, signed by the coordinator's own root."""
    document = read_membership(members.root / "members.json")
    create_root(members.folder / "mine", members.tls.name)
    root = load_private_key(members.folder / "mine" / "root.key")
    following = document.model_copy(update={"epoch": document.epoch + 1})
    return SignedMembership.make(root, following).to_bytes()


def unsigned(members: Members) -> bytes:
    return foreign(members).replace(b'"signature": "', b'"signature": "' + b"0" * 128)[:-133]


def changed(members: Members) -> bytes:
    """Return the root's own document, with a host's name changed."""
    return (members.root / "members.json").read_bytes().replace(b'"host-0"', b'"host-x"')


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (ten_years, "at most 366 days are allowed"),
        (foreign, "not signed by the federation root"),
        (unsigned, "from the coordinator: "),
        (changed, "not signed by the federation root"),
    ],
    ids=["ten years", "foreign", "unsigned", "changed"],
)
async def test_membership_not_signed_by_the_root_is_refused_by_all_hosts(
    dependent: Scene, make: Callable[[Members], bytes], why: str
) -> None:
    federation = dependent.federation
    before, document = kept(dependent, "host-0"), make(federation.members)

    class Sent(Script):
        done = False

        def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
            first = host == "host-0" and not self.done
            self.done = self.done or first
            forged = rpc.AttendResponse(membership=rpc.Membership(document=document))
            return [forged, message] if first else [message]

    dependent.liar.script = Sent()
    with capture_logs() as lines:
        outcome = await federation.sum()
    assert outcome.total is not None, outcome.explain()
    [line] = [each for each in lines if each["event"] == "member list refused"]
    assert why in line["why"]
    assert kept(dependent, "host-0") == before


async def test_coordinator_can_withhold_a_newer_membership(dependent: Scene) -> None:
    """Out of scope: hosts with the membership from the coordinator only. A file from the operator
    would prevent this."""
    federation = dependent.federation
    before = in_force(federation.members)
    revoke_members(federation.members.root, ["client-5"])
    dependent.liar.script = HeldBack(everybody)
    await send(dependent, reaches=lambda _: False)

    class Back(OtherHeaders):
        def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
            if message.WhichOneof("message") == "membership":
                return []
            return super().to_host(host, message)

    dependent.liar.script = Back(before, everybody)
    await federation.sum(federation.members.names[:5])
    adverts = {
        host
        for host, message in dependent.liar.said
        for envelope in message.answer.secure.envelopes
        if envelope.type == int(MessageType.ADVERT)
    }
    assert adverts == {f"host-{number}" for number in range(5)}  # all hosts use the old membership
