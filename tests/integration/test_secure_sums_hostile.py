"""A lying coordinator over real gRPC: six real hosts, one of which receives forged messages.

The coordinator is the real one; its messages to the victim are forged on their way out. The tests
begin with the late attacks: by then, the others have sent their shares for all six hosts, and
continue to do so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.federation import until
from support.sum_federation import Members, SumFederation, sum_federation

from potluck.common.net.membership import load_private_key
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.coordinator import counts as secure_sums
from potluck.secagg.coordinator.counts import SumOutcome
from potluck.secagg.host.sum_sessions import SumSessions
from potluck.secagg.protocol import (
    Envelope,
    MessageType,
    Noise,
    Thresholds,
    decode,
    encode,
)
from potluck.secagg.protocol.coordinator import coordinator_answers
from potluck.secagg.protocol.wire.messages import (
    Advert,
    Certificate,
    Delivery,
    Endorsement,
    Header,
    Invitation,
    RefusalMessage,
    Reveal,
    RosterMessage,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import sign

pytestmark = pytest.mark.asyncio(loop_scope="module")

VICTIM = "client-0"

INVITATION, ROSTER, DELIVERY = MessageType.INVITATION, MessageType.ROSTER, MessageType.DELIVERY
SURVIVORS, CERTIFICATE = MessageType.SURVIVORS, MessageType.CERTIFICATE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def federation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SumFederation]:
    folder = tmp_path_factory.mktemp("hostile")
    async with sum_federation(Members.make(folder / "members", 6), folder) as federation:
        await federation.start()
        yield federation


Edit = Callable[[Any], Any]
"""Function that changes a decoded message of `secagg.messages`."""

KINDS: dict[MessageType, type[Any]] = {
    INVITATION: Invitation,
    ROSTER: RosterMessage,
    DELIVERY: Delivery,
    SURVIVORS: Survivors,
    CERTIFICATE: Certificate,
}


@dataclass
class Attack:
    """Envelopes sent to the victim, and its answers to the forged one."""

    sent: list[Envelope] = field(default_factory=list)
    answers: list[rpc.Answer] = field(default_factory=list)

    def forget(self) -> None:
        self.sent.clear()
        self.answers.clear()

    @property
    def refusal(self) -> str:
        """The rule in the victim's signed refusal."""
        [answer] = self.answers
        [message] = answer.secure.envelopes
        assert MessageType(message.type) is MessageType.REFUSAL
        assert len(message.signature) == 64
        return str(decode(RefusalMessage, message.payload).rule)


@contextlib.contextmanager
def attacking(
    federation: SumFederation, kind: MessageType, forge: Callable[[Envelope], Envelope]
) -> Iterator[Attack]:
    """Forge the first message of this kind to the victim."""
    attendance, attack = federation.coordinator.attendance, Attack()
    honest = attendance.instruct

    def instruct(instruction: rpc.Instruction, **options: Any) -> None:
        if instruction.client_id == VICTIM and instruction.HasField("secure"):
            serialised = instruction.secure.envelope.SerializeToString(deterministic=True)
            envelope = decode(Envelope, serialised)
            if envelope.type is kind and kind not in {each.type for each in attack.sent}:
                forged = wire.SecureEnvelope.FromString(encode(forge(envelope)))
                instruction.secure.envelope.CopyFrom(forged)
                heard = options["on_answer"]

                def on_answer(answer: rpc.Answer) -> None:
                    attack.answers.append(answer)
                    heard(answer)

                options["on_answer"] = on_answer
            attack.sent.append(envelope)
        honest(instruction, **options)

    attendance.instruct = instruct  # type: ignore[method-assign]
    try:
        yield attack
    finally:
        attendance.instruct = honest  # type: ignore[method-assign]


def edited(edit: Edit) -> Callable[[Envelope], Envelope]:
    def forge(envelope: Envelope) -> Envelope:
        message = edit(decode(KINDS[envelope.type], envelope.payload))
        return replace(envelope, payload=encode(message))

    return forge


async def summed(federation: SumFederation, *attacks: Attack) -> SumOutcome:
    """Repeat a sum until the victim's answer to the last of these attacks is received; return the
    last sum's outcome. A sum may finish without the victim, whose answer is ignored then."""
    while True:
        for attack in attacks:
            attack.forget()
        outcome = await federation.sum()
        if attacks[-1].answers:
            return outcome


async def told(federation: SumFederation, kind: MessageType, edit: Edit) -> str:
    """Return the rule by which the victim refuses; check that it has released nothing."""
    before = len(federation.ledger(VICTIM).of(VICTIM).releases)
    with attacking(federation, kind, edited(edit)) as attack:
        await summed(federation, attack)
    assert len(federation.ledger(VICTIM).of(VICTIM).releases) == before
    return attack.refusal


def endorsements(edit: Callable[[Sequence[Endorsement]], Sequence[Endorsement]]) -> Edit:
    return lambda message: replace(message, endorsements=tuple(edit(message.endorsements)))


@pytest.mark.parametrize(
    ("kind", "edit", "rule"),
    [
        pytest.param(
            SURVIVORS,
            lambda message: replace(message, clients=message.clients[1:]),
            "set",
            id="victim missing",
        ),
        pytest.param(
            SURVIVORS,
            lambda message: replace(message, clients=(*message.clients, "client-9")),
            "set",
            id="unknown client",
        ),
        pytest.param(
            SURVIVORS,
            lambda message: replace(message, clients=message.clients[:3]),
            "too-few",
            id="three survivors",
        ),
        pytest.param(
            CERTIFICATE, endorsements(lambda all_: all_[1:]), "certificate", id="no quorum"
        ),
        pytest.param(
            CERTIFICATE,
            endorsements(lambda all_: [*all_[:-1], all_[-2]]),
            "duplicate",
            id="repeated consent",
        ),
        pytest.param(
            CERTIFICATE,
            endorsements(lambda all_: [replace(all_[0], signature=bytes(64)), *all_[1:]]),
            "signature",
            id="forged consent",
        ),
    ],
)
async def test_clients_refuse_forged_messages_after_their_upload(
    federation: SumFederation, kind: MessageType, edit: Edit, rule: str
) -> None:
    assert await told(federation, kind, edit) == rule


async def test_client_refuses_a_second_consent_in_a_session(federation: SumFederation) -> None:
    def another(envelope: Envelope) -> Envelope:
        session_id = decode(Certificate, envelope.payload).session_id
        clients = tuple(federation.members.names[:5])
        return Envelope(SURVIVORS, encode(Survivors(session_id, clients)))

    with attacking(federation, CERTIFICATE, another) as attack:
        await summed(federation, attack)
    assert attack.refusal == "stage"


async def test_client_refuses_to_send_its_shares_twice(federation: SumFederation) -> None:
    with attacking(federation, CERTIFICATE, lambda envelope: envelope) as attack:
        outcome = await summed(federation, attack)
    assert outcome.total is not None
    [certificate] = [each for each in attack.sent if each.type is CERTIFICATE]
    again: list[rpc.Answer] = []
    session_id = bytes.fromhex(outcome.record.session_id)
    federation.coordinator.attendance.instruct(
        rpc.Instruction(
            id="again",
            client_id=VICTIM,
            secure=rpc.SecureStep(
                session_id=session_id, envelope=wire.SecureEnvelope.FromString(encode(certificate))
            ),
        ),
        deadline=time.monotonic() + 60,
        on_answer=again.append,
    )
    await until(lambda: bool(again))
    assert again[0].failure.reason == "PROTOCOL_VIOLATED"


async def test_client_refuses_a_used_session_id(federation: SumFederation) -> None:
    earlier = (await federation.stored())[-1] if await federation.stored() else None
    if earlier is None:
        await federation.sum()
        [earlier] = await federation.stored()
    await until(lambda: bool(federation.ledger(VICTIM).of(VICTIM).uploads))
    used = federation.ledger(VICTIM).of(VICTIM).uploads[-1].session_id
    edit = header(session_id=bytes.fromhex(used))
    with attacking(federation, INVITATION, edited(edit)) as attack:
        await summed(federation, attack)
    assert attack.refusal == "session"


# In the tests below, the other clients refuse a sum without the victim.


def header(**changes: Any) -> Edit:
    def edit(message: Invitation) -> Invitation:
        return replace(message, header=encode(replace(decode(Header, message.header), **changes)))

    return edit


def now() -> int:
    return int(time.time())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (lambda: {"least_hosts": 3}, "policy"),
        (lambda: {"disclosure": "protocol"}, "policy"),
        (lambda: {"degree": 2}, "policy"),
        (lambda: {"threshold": 1}, "threshold"),
        (lambda: {"federation": "other"}, "version"),
        (lambda: {"noise": Noise(epsilon=1.0, sensitivity=1, contributors=2)}, "policy"),
        (lambda: {"noise": Noise(epsilon=5.0, sensitivity=2, contributors=2)}, "policy"),
        (lambda: {"issued_at": now() - 900, "expires_at": now() - 600}, "expired"),
        (lambda: {"issued_at": now() + 900, "expires_at": now() + 999}, "clocks"),
        (lambda: {"vectors": ()}, "input"),
    ],
)
async def test_clients_refuse_weakened_headers(
    federation: SumFederation, changes: Callable[[], dict[str, Any]], rule: str
) -> None:
    assert await told(federation, INVITATION, header(**changes())) == rule


def replaced_advert(**changes: Any) -> Edit:
    """Replace the last client's keys by keys of the coordinator."""

    def edit(message: RosterMessage) -> RosterMessage:
        *others, last = message.adverts
        advert = replace(decode(Advert, last.payload), **changes)
        return replace(message, adverts=(*others, replace(last, payload=encode(advert))))

    return edit


def enrolled_elsewhere(message: RosterMessage) -> RosterMessage:
    """Replace the last client by the coordinator under another name."""
    *others, last = message.adverts
    advert = decode(Advert, last.payload)
    forged = replace(advert, client="zoe")
    signed = sign(Ed25519PrivateKey.generate(), MessageType.ADVERT, encode(forged))
    return replace(message, adverts=(*others, signed))


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        pytest.param(
            replaced_advert(mask_key=bytes([9] * 32)), "signature", id="key of another client"
        ),
        pytest.param(enrolled_elsewhere, "member", id="not enrolled"),
        pytest.param(
            lambda message: replace(message, adverts=message.adverts[:3]),
            "too-few",
            id="three adverts",
        ),
        pytest.param(
            lambda message: replace(message, adverts=message.adverts[1:]),
            "roster",
            id="victim missing",
        ),
        pytest.param(
            lambda message: replace(message, adverts=(*message.adverts[:5], message.adverts[4])),
            "duplicate",
            id="client twice",
        ),
    ],
)
async def test_clients_refuse_forged_rosters(
    federation: SumFederation, edit: Edit, rule: str
) -> None:
    assert await told(federation, ROSTER, edit) == rule


async def test_clients_refuse_key_adverts_of_another_session(federation: SumFederation) -> None:
    with attacking(federation, ROSTER, lambda envelope: envelope) as attack:
        await federation.sum()
    [roster] = [each for each in attack.sent if each.type is ROSTER][:1]
    old = decode(RosterMessage, roster.payload).adverts

    def replay(message: RosterMessage) -> RosterMessage:
        return replace(message, adverts=(message.adverts[0], *old[1:]))

    assert await told(federation, ROSTER, replay) == "header"


def flipped(message: Delivery) -> Delivery:
    first, *others = message.shares
    changed = bytes([first.ciphertext[0] ^ 1]) + first.ciphertext[1:]
    return replace(message, shares=(replace(first, ciphertext=changed), *others))


def swapped(message: Delivery) -> Delivery:
    first, second, *others = message.shares
    one = replace(first, ciphertext=second.ciphertext)
    two = replace(second, ciphertext=first.ciphertext)
    return replace(message, shares=(one, two, *others))


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (flipped, "share"),
        (swapped, "share"),
        (lambda message: replace(message, shares=message.shares[1:]), "share"),
        (
            lambda message: replace(
                message, sharers=message.sharers[:3], shares=message.shares[:2]
            ),
            "too-few",
        ),
    ],
    ids=["flipped", "swapped", "missing", "few"],
)
async def test_clients_refuse_forged_shares(
    federation: SumFederation, edit: Edit, rule: str
) -> None:
    assert await told(federation, DELIVERY, edit) == rule


async def test_all_clients_refuse_low_thresholds(
    federation: SumFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = Thresholds(degree=0, threshold=3, quorum=3)
    monkeypatch.setattr(secure_sums, "complete_thresholds", lambda *_: low)
    outcome = await federation.sum()
    assert outcome.total is None
    assert outcome.record.refusals == dict.fromkeys(federation.members.names, "threshold")


async def test_client_with_a_forged_survivor_list_never_unmasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim receives lists without client-5 throughout; the coordinator accepts its
    answers."""

    def less(clients: Sequence[str]) -> tuple[str, ...]:
        return tuple(each for each in clients if each != "client-5")

    def without(message: Any) -> Any:
        if isinstance(message, Delivery):
            shares = tuple(each for each in message.shares if each.client != "client-5")
            return replace(message, sharers=less(message.sharers), shares=shares)
        return replace(message, clients=less(message.clients))

    for check in ("_take_upload", "_take_consent"):
        monkeypatch.setattr(coordinator_answers, check, lambda *_: None)
    async with sum_federation(Members.make(tmp_path / "members", 6), tmp_path) as federation:
        await federation.start()
        with (
            attacking(federation, DELIVERY, edited(without)) as masked,
            attacking(federation, SURVIVORS, edited(without)) as consented,
            attacking(federation, CERTIFICATE, lambda envelope: envelope) as attack,
        ):
            await summed(federation, masked, consented, attack)
        [vouched] = masked.answers[0].secure.envelopes
        [consent] = consented.answers[0].secure.envelopes
        # The victim accepted the forged view.
        assert MessageType(vouched.type) is MessageType.MASKED_INPUT
        assert MessageType(consent.type) is MessageType.CONSENT
        assert attack.refusal == "signature"  # other clients consented to another set
        # If the victim's consent was among the first ones, the others refuse as well, and the
        # victim takes part in the honest second attempt.
        first = next(each for each in consented.sent if each.type is SURVIVORS)
        forged = decode(Survivors, first.payload).session_id.hex()
        released = federation.ledger(VICTIM).of(VICTIM).releases
        assert forged not in {each.session_id for each in released}


def flipped_share(share: bytes) -> bytes:
    return share[:1] + bytes([share[1] ^ 1]) + share[2:]


@pytest.mark.parametrize(("liars", "exact"), [(3, True), (4, False)])
async def test_forged_shares_of_few_hosts_are_corrected_and_of_many_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liars: int, exact: bool
) -> None:
    """Some of ten hosts sign invented shares; shares of seven hosts are needed."""
    members = Members.make(tmp_path / "members", 10)
    lying = frozenset(members.names[:liars])
    honest = SumSessions.answer

    async def answer(self: SumSessions, instruction: rpc.Instruction, count: Any) -> Any:
        reply = await honest(self, instruction, count)
        name = instruction.client_id
        for place, message in enumerate(reply.envelopes):
            if name in lying and MessageType(message.type) is MessageType.REVEAL:
                reveal = decode(Reveal, message.payload)
                shares = [replace(each, share=flipped_share(each.share)) for each in reveal.shares]
                payload = encode(replace(reveal, shares=tuple(shares)))
                key = load_private_key(members.root / "members" / f"{name}.key")
                forged = encode(sign(key, MessageType.REVEAL, payload))
                reply.envelopes[place].CopyFrom(wire.SecureEnvelope.FromString(forged))
        return reply

    monkeypatch.setattr(SumSessions, "answer", answer)
    async with sum_federation(members, tmp_path) as federation:
        await federation.start()
        outcome = await federation.sum()
    if exact:
        assert outcome.total is not None, outcome.explain()
        assert outcome.total.tolist() == federation.counts(members.names).tolist()
    else:
        assert outcome.total is None
        assert outcome.record.rule == "reconstruction"
