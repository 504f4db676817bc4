"""A client's side of a session: a pure state machine.

`begin` answers an invitation, and `handle` every later message. Call `uploaded` when the client
sends its masked vector. Each returns a `ClientStep`: the next session, the replies, the ledger
entries to write *before* the replies are sent, and a refusal if a rule was broken. A broken rule
ends the session: secrets are dropped, and the coordinator gets a signed refusal. This side has no
clock or randomness: time and random bytes are in the `Situation`.

A session is an immutable value. Keep the newest and drop older ones: a client that returns to an
older session and answers differently breaks the protocol. A repeated message gets the same answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import TypeVar

from potluck.secagg.protocol.client.accusing import give_evidence
from potluck.secagg.protocol.client.client_session import (
    Accusing,
    Advertised,
    Agreed,
    Answer,
    ClientSession,
    ClientState,
    ClientStep,
    Consented,
    Ended,
    Masking,
    Revealed,
    Shared,
    Situation,
    SumParty,
    Uploaded,
)
from potluck.secagg.protocol.client.client_stages import (
    advertise,
    consent,
    derive_masks,
    reveal,
    share_secrets,
)
from potluck.secagg.protocol.policy.ledger import (
    check_charge,
)
from potluck.secagg.protocol.policy.one_set import keeps_to_one_set, superseded
from potluck.secagg.protocol.policy.pins import check_pins
from potluck.secagg.protocol.policy.sum_policy import Expectation, check_header
from potluck.secagg.protocol.rules import BrokenRuleError, Refusal, Rule, require
from potluck.secagg.protocol.wire.message_encoding import decode, encode
from potluck.secagg.protocol.wire.messages import (
    Abort,
    Certificate,
    Delivery,
    Dispute,
    Envelope,
    Header,
    Invitation,
    MaskedInput,
    MessageType,
    RefusalMessage,
    RosterMessage,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import (
    sign,
)

M = TypeVar("M", Abort, RosterMessage, Delivery, Dispute, Survivors, Certificate)


def begin(
    party: SumParty,
    invitation: Envelope,
    expected: Expectation,
    situation: Situation,
    *,
    used: Container[bytes] = frozenset(),
    others: Iterable[ClientSession] = (),
) -> ClientStep:
    """Answer an invitation with an advert, or a refusal.

    used: ids of the sessions that this client has begun. others: its sessions in progress.
    """
    session_id = b""
    try:
        require(
            invitation.type is MessageType.INVITATION,
            Rule.STAGE,
            "the first message of a session must be an invitation",
        )
        require(
            not invitation.signature,
            Rule.MALFORMED,
            "the message has a signature, but the coordinator does not sign messages",
        )
        message = decode(Invitation, invitation.payload)
        header = decode(Header, message.header)
        session_id = header.session_id
        require(
            session_id not in used,
            Rule.SESSION,
            "the session's id was used before in another session",
        )
        now = situation.now
        check_header(header, party.policy, expected, party.root.federation, now)
        party.root.check_header(header)
        record = party.root.member(party.client, now)
        own = party.key.public_key().public_bytes_raw().hex()
        require(
            record.public_key == own,
            Rule.MEMBER,
            "the host's key for this client is not the key in the client's member record",
        )
        check_charge(situation.ledger, header)
        check_pins(situation.ledger, header, expected, party.policy)
        agreed = Agreed(
            party=party,
            header=header,
            header_sha256=hashlib.sha256(message.header).digest(),
            expected=expected,
            certified=message.certified,
        )
        dropped: tuple[bytes, ...] = ()
        if keeps_to_one_set(header, party.policy):
            headers = [each.header for each in others if each.header is not None]
            dropped = superseded(header, headers, party.policy, now)
        answer = advertise(agreed, situation)
    except BrokenRuleError as error:
        return _refuse(party, session_id, error.refusal, _digest(invitation))
    return replace(_step(session_id, answer, _digest(invitation)), superseded=dropped)


def handle(session: ClientSession, envelope: Envelope, situation: Situation) -> ClientStep:
    """Answer a message of the coordinator. Never raises, whatever the message contains."""
    digest = _digest(envelope)
    if digest == session.heard:
        return ClientStep(session=session, replies=session.said, repeated=True)
    state = session.state
    if isinstance(state, Revealed | Ended):
        over = Refusal(Rule.STAGE, "the session has ended")
        told = envelope.type is MessageType.ABORT
        return ClientStep(session=session, refusal=None if told else over)
    agreed = state.agreed
    try:
        require(
            not envelope.signature,
            Rule.MALFORMED,
            "the message has a signature, but the coordinator does not sign messages",
        )
        if envelope.type is MessageType.ABORT:
            abort = _decode(Abort, envelope, session.session_id)
            return ClientStep(
                session=replace(session, state=Ended(abort=abort), heard=digest, said=())
            )
        expires = agreed.header.expires_at
        require(situation.now.timestamp() < expires, Rule.EXPIRED, "the session's time has ended")
        answer = _answer(state, envelope, session.session_id, situation)
    except BrokenRuleError as error:
        return _refuse(agreed.party, session.session_id, error.refusal, digest)
    return _step(session.session_id, answer, digest)


def uploaded(session: ClientSession, upload_digest: bytes) -> ClientStep:
    """Sign a confirmation of the masked vector that the client uploads.

    upload_digest: digest of the whole file, 32 bytes, with the coordinator's hash function. Raises
    ValueError unless the session is at `Masking`.
    """
    state = session.state
    if not isinstance(state, Masking):
        raise ValueError("nothing can be uploaded at this stage of the session")
    message = MaskedInput(state.view.sharers_sha256, state.agreed.client, upload_digest)
    reply = sign(state.agreed.party.key, MessageType.MASKED_INPUT, encode(message))
    answer = Answer(Uploaded(agreed=state.agreed, view=state.view), (reply,))
    return _step(session.session_id, answer, session.heard)


def refuse(session: ClientSession, refusal: Refusal) -> ClientStep:
    """End a session for a reason of the client's own, e.g. an input out of bounds."""
    state = session.state
    if isinstance(state, Revealed | Ended):
        return ClientStep(session=session)
    return _refuse(state.agreed.party, session.session_id, refusal, session.heard)


def _answer(
    state: ClientState, envelope: Envelope, session_id: bytes, situation: Situation
) -> Answer:
    match state, envelope.type:
        case Advertised(), MessageType.ROSTER:
            message = _decode(RosterMessage, envelope, session_id)
            return share_secrets(state, message, situation)
        case Shared(), MessageType.DELIVERY:
            return derive_masks(state, _decode(Delivery, envelope, session_id), situation)
        case Accusing(), MessageType.DISPUTE:
            return give_evidence(state, _decode(Dispute, envelope, session_id), situation)
        case Uploaded(), MessageType.SURVIVORS:
            return consent(state, _decode(Survivors, envelope, session_id), situation)
        case Consented(), MessageType.CERTIFICATE:
            return reveal(state, _decode(Certificate, envelope, session_id), situation)
    raise BrokenRuleError(
        Rule.STAGE,
        f"unexpected message of type {envelope.type.name} at stage {type(state).__name__}",
    )


def _decode(kind: type[M], envelope: Envelope, session_id: bytes) -> M:
    message = decode(kind, envelope.payload)
    require(
        message.session_id == session_id, Rule.SESSION, "the message belongs to another session"
    )
    return message


def _step(session_id: bytes, answer: Answer, heard: bytes) -> ClientStep:
    session = ClientSession(
        session_id=session_id, state=answer.state, heard=heard, said=answer.replies
    )
    return ClientStep(
        session=session, replies=answer.replies, entries=answer.entries, refusal=answer.refusal
    )


def _refuse(party: SumParty, session_id: bytes, refusal: Refusal, heard: bytes) -> ClientStep:
    replies: tuple[Envelope, ...] = ()
    if session_id:
        message = RefusalMessage(session_id, party.client, refusal.rule, refusal.detail[:500])
        replies = (sign(party.key, MessageType.REFUSAL, encode(message)),)
    session = ClientSession(
        session_id=session_id, state=Ended(refusal=refusal), heard=heard, said=replies
    )
    return ClientStep(session=session, replies=replies, refusal=refusal)


def _digest(envelope: Envelope) -> bytes:
    return hashlib.sha256(encode(envelope)).digest()
