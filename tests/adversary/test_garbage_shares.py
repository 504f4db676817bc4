"""One malicious client seals invalid shares for others, which then can't continue.

Before clients sent evidence, retries excluded the victims and kept the malicious client.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from adversary.conftest import CLIENTS, Scene
from adversary.proxy import Script
from support.sum_federation import host_of

from potluck.common.net.membership import load_private_key
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import secure_aggregation_pb2 as wire
from potluck.secagg.coordinator.sum_session import RootInForce
from potluck.secagg.protocol import Envelope, MessageType, Rule, SessionRecord, decode, encode
from potluck.secagg.protocol.wire.evidence import Conviction, check_verdict
from potluck.secagg.protocol.wire.messages import Delivery, RefusalMessage, Shares
from potluck.secagg.protocol.wire.transcript import sign
from potluck.server.store import RunState

SENDER = "client-5"
OTHERS = [f"client-{number}" for number in range(CLIENTS - 1)]
MASKED = f"""
secure_aggregation = true
rounds = 1
clients_per_round = {CLIENTS - 1}
expected_clients = {CLIENTS}
selector.name = "round-robin"
task = {{name = "digits", clients = {CLIENTS}}}
training = {{steps = 5}}
masking = {{stage_seconds = 20.0}}
round = {{deadline_seconds = 60.0, quorum = 0.5, attempts = 1}}
"""


def rewritten(message: wire.SecureEnvelope, edit: Callable[[Envelope], Envelope]) -> None:
    envelope = decode(Envelope, message.SerializeToString(deterministic=True))
    message.CopyFrom(wire.SecureEnvelope.FromString(encode(edit(envelope))))


class Malicious(Script):
    """Replaces the envelopes of one member, whose key is known, by others signed with that key."""

    def __init__(self, scene: Scene, client: str) -> None:
        self.client = client
        self._host = host_of(client)
        folder: Path = scene.federation.members.root / "members"
        self._key = load_private_key(folder / f"{client}.key")

    def edit(self, envelope: Envelope) -> Envelope:
        """Return the envelope that the malicious member sends in place of this one."""
        raise NotImplementedError

    def signed(self, kind: MessageType, message: Any) -> Envelope:
        return sign(self._key, kind, encode(message))

    def from_host(self, host: str, message: rpc.AttendRequest) -> Iterable[rpc.AttendRequest]:
        if host == self._host:
            for each in message.answer.secure.envelopes:
                rewritten(each, self.edit)
        return [message]


class Garbage(Malicious):
    """Seals garbage in place of shares for some clients."""

    def __init__(self, scene: Scene, client: str, victims: Iterable[str]) -> None:
        super().__init__(scene, client)
        self.victims = frozenset(victims)

    def edit(self, envelope: Envelope) -> Envelope:
        if envelope.type is not MessageType.SHARES:
            return envelope
        message = decode(Shares, envelope.payload)
        shares = tuple(
            replace(each, ciphertext=bytes(82)) if each.client in self.victims else each
            for each in message.shares
        )
        return self.signed(MessageType.SHARES, replace(message, shares=shares))


class Slander(Malicious):
    """Reports that another client's share does not open, instead of uploading."""

    def edit(self, envelope: Envelope) -> Envelope:
        if envelope.type is not MessageType.MASKED_INPUT:
            return envelope
        refusal = RefusalMessage(self.session, self.client, Rule.SHARE, "it says", SENDER)
        return self.signed(MessageType.REFUSAL, refusal)

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        if message.instruction.WhichOneof("work") == "secure":
            self.session = message.instruction.secure.session_id
        return [message]


class Damaging(Script):
    """Coordinator that damages a forwarded share, to get evidence against an honest client."""

    def to_host(self, host: str, message: rpc.AttendResponse) -> Iterable[rpc.AttendResponse]:
        secure = message.instruction.secure
        if host == "host-0" and secure.envelope.type == int(MessageType.DELIVERY):
            rewritten(secure.envelope, self.edit)
        return [message]

    def edit(self, envelope: Envelope) -> Envelope:
        message = decode(Delivery, envelope.payload)
        *others, last = message.shares
        damaged = replace(message, shares=(*others, replace(last, ciphertext=bytes(82))))
        return replace(envelope, payload=encode(damaged))


async def records(scene: Scene) -> list[SessionRecord]:
    return [SessionRecord.model_validate(each.record) for each in await scene.federation.stored()]


def said(scene: Scene, kind: MessageType) -> set[str]:
    """Return the hosts that have sent a message of a kind."""
    return {
        host
        for host, message in scene.liar.said
        for each in message.answer.secure.envelopes
        if MessageType(each.type) is kind
    }


def check_convicted(
    scene: Scene, record: SessionRecord, victims: list[str], sender: str = SENDER
) -> None:
    [accuser] = record.convicted.values()
    assert record.convicted == {sender: accuser}
    assert accuser in victims
    root = RootInForce(scene.federation.coordinator.trust).now
    assert root is not None
    found = check_verdict(base64.b64decode(record.verdict), root, datetime.now(UTC))
    assert found == Conviction(sender, accuser)


@pytest.mark.parametrize("victims", [OTHERS[:1], OTHERS], ids=["for one", "for all"])
async def test_sum_excludes_only_the_client_that_sealed_invalid_shares(
    scene: Scene, victims: list[str]
) -> None:
    scene.liar.script = Garbage(scene, SENDER, victims)
    outcome = await scene.federation.sum(epsilon=0.1)
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == OTHERS
    assert outcome.troubles.keys() == {SENDER}
    assert "proved this" in outcome.troubles[SENDER]
    aborted, released = await records(scene)
    check_convicted(scene, aborted, victims)
    assert released.convicted == {}


async def test_masked_round_succeeds_without_the_sender_of_invalid_shares(scene: Scene) -> None:
    sender, victims = OTHERS[0], OTHERS[1:3]
    scene.liar.script = Garbage(scene, sender, victims)
    row = await scene.federation.coordinator.start_run(MASKED)
    driver = scene.federation.coordinator.runs.driver(row.run_id)
    assert driver is not None
    watched, told = driver.feed.watch(), list[str]()
    while (event := await watched.get()) is not None:
        told.append(event.notice.text)
    row = await scene.federation.ended(row.run_id)
    assert row.state is RunState.FINISHED, row.reason
    assert any(f"client {sender} sent client " in text and "proved this" in text for text in told)
    aborted, released = await records(scene)
    check_convicted(scene, aborted, victims, sender)
    assert sorted(released.clients) == [*OTHERS[1:], SENDER]  # and the attempt did not count


async def test_sum_excludes_only_the_client_with_a_false_accusation(scene: Scene) -> None:
    scene.liar.script = Slander(scene, "client-0")
    outcome = await scene.federation.sum(epsilon=0.1)
    assert outcome.total is not None, outcome.explain()
    assert sorted(outcome.record.clients) == [*OTHERS[1:], SENDER]
    assert outcome.record.convicted == {}
    [record] = await records(scene)
    assert record.verdict == ""


async def test_coordinator_that_damages_shares_receives_no_evidence(scene: Scene) -> None:
    scene.liar.script = Damaging()
    outcome = await scene.federation.sum(epsilon=0.1)
    assert outcome.record.refusals == {"client-0": Rule.SHARE}
    assert said(scene, MessageType.REFUSAL) == {"host-0"}
    assert not said(scene, MessageType.EVIDENCE)
    assert not any(record.convicted for record in await records(scene))
