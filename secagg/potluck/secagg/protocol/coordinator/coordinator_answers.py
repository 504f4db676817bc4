"""Clients' answers: the coordinator checks each one before it uses it.

All checks raise BrokenRuleError, which `coordinator_side` turns into a refusal of the message.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final, TypeVar

from potluck.secagg.protocol.coordinator.coordinator_session import (
    Advertising,
    Collecting,
    Consenting,
    Revealing,
    SessionSetup,
    Sharing,
    Uploading,
)
from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import check_order
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require
from potluck.secagg.protocol.wire.message_encoding import check_names, decode, encode
from potluck.secagg.protocol.wire.messages import (
    Consent,
    Envelope,
    Evidence,
    MaskedInput,
    MessageType,
    Reveal,
    Secret,
    Shares,
)
from potluck.secagg.protocol.wire.transcript import (
    CheckedAdvert,
    Roster,
    check_advert,
    check_distinct,
    verify,
)

_ORDER: Final = (
    (MessageType.ADVERT, Advertising),
    (MessageType.SHARES, Sharing),
    (MessageType.MASKED_INPUT, Uploading),
    (MessageType.CONSENT, Consenting),
    (MessageType.REVEAL, Revealing),
)


def is_late(kind: MessageType, state: Collecting) -> bool:
    """Return True if a message answers an earlier stage: then its sender is late, not hostile."""
    if kind is MessageType.EVIDENCE:
        return isinstance(state, Consenting | Revealing)
    kinds = [each for each, _ in _ORDER]
    reached = next(place for place, (_, stage) in enumerate(_ORDER) if isinstance(state, stage))
    return kind in kinds[:reached]


def answered(
    setup: SessionSetup,
    state: Collecting,
    client: str,
    envelope: Envelope,
    now: datetime,
    upload_digest: bytes | None,
) -> Collecting:
    """Check a client's answer and add it to the state. Raises BrokenRuleError."""
    match state, envelope.type:
        case Advertising(), MessageType.ADVERT:
            advert = _take_advert(setup, state, client, envelope, now)
            return replace(state, answers={**state.answers, client: advert})
        case Sharing(), MessageType.SHARES:
            _check_shares(state, client, envelope)
            return replace(state, answers={**state.answers, client: envelope})
        case Uploading(), MessageType.MASKED_INPUT:
            _take_upload(state, client, envelope, upload_digest)
            return replace(state, answers={**state.answers, client: upload_digest or b""})
        case Consenting(), MessageType.CONSENT:
            _take_consent(state, client, envelope)
            return replace(state, answers={**state.answers, client: envelope.signature})
        case Revealing(), MessageType.REVEAL:
            reveal = _take_reveal(state, client, envelope)
            return replace(state, answers={**state.answers, client: reveal})
    raise BrokenRuleError(
        Rule.STAGE, f"unexpected message of type {envelope.type.name} at stage {state.stage}"
    )


def _take_advert(
    setup: SessionSetup, state: Advertising, client: str, envelope: Envelope, now: datetime
) -> CheckedAdvert:
    found = check_advert(envelope, setup.header_sha256, setup.root, now)
    named, host = found.advert.client, found.record.host
    require(
        named == client,
        Rule.MEMBER,
        f"client {client!r} sent an advert that names client {named!r}",
    )
    require(
        host == setup.invited[client],
        Rule.MEMBER,
        f"client {client!r} is on host {setup.invited[client]!r}, but the client's member record "
        f"names host {host!r}",
    )
    # Check now: all other clients would refuse a roster with a bad key.
    check_order(found.advert.mask_key)
    check_order(found.advert.channel_key)
    check_distinct([*state.answers.values(), found])
    return found


def _check_shares(state: Sharing, client: str, envelope: Envelope) -> None:
    message = signed_by(state.roster, client, envelope, Shares)
    require(
        message.roster_sha256 == state.roster.digest,
        Rule.ROSTER,
        "the client answered another roster",
    )
    found = [each.client for each in message.shares]
    check_names(found, "the shares")
    expected = sorted(state.roster.neighbours[client])
    require(found == expected, Rule.SHARE, "the client must send shares to exactly its neighbours")


def _take_upload(
    state: Uploading, client: str, envelope: Envelope, upload_digest: bytes | None
) -> None:
    require(
        client not in state.disputes,
        Rule.STAGE,
        f"client {client!r} accused another client, so it can't upload",
    )
    message = signed_by(state.roster, client, envelope, MaskedInput)
    require(
        message.sharers_sha256 == state.sharers_sha256,
        Rule.SET,
        "the client answered another set of sharers",
    )
    require(
        message.upload_digest == upload_digest,
        Rule.UPLOAD,
        f"the uploaded vector of client {client!r} is not the vector that the client signed",
    )


def _take_consent(state: Consenting, client: str, envelope: Envelope) -> None:
    key = state.roster.participants[client].key
    verify(key, envelope, client)
    wanted = Consent(state.roster.digest, state.sharers_sha256, state.survivors_sha256)
    require(
        envelope.payload == encode(wanted),
        Rule.SET,
        "the consent is not for this session's set of clients",
    )


def _take_reveal(state: Revealing, client: str, envelope: Envelope) -> Reveal:
    message = signed_by(state.roster, client, envelope, Reveal)
    require(
        message.survivors_sha256 == state.survivors_sha256,
        Rule.SET,
        "the client revealed shares for another set of clients",
    )
    owners = [each.owner for each in message.shares]
    check_names(owners, "the owners of the revealed shares")
    holds = {client, *state.roster.neighbours[client]}.intersection(state.sharers)
    require(
        owners == sorted(holds),
        Rule.SHARE,
        "the client must reveal shares of exactly the sharers whose shares it holds",
    )
    alive = frozenset(state.survivors)
    for each in message.shares:
        wanted = Secret.SEED if each.owner in alive else Secret.MASK_KEY
        require(
            each.secret is wanted, Rule.SHARE, "the client revealed a share of the wrong secret"
        )
        try:
            sharing.from_bytes(each.share)
        except ValueError as error:
            raise BrokenRuleError(Rule.SHARE, str(error)) from None
    return message


S = TypeVar("S", Shares, MaskedInput, Reveal, Evidence)


def signed_by(roster: Roster, client: str, envelope: Envelope, kind: type[S]) -> S:
    """Return a message that its sender signed and that names it. Raises BrokenRuleError."""
    verify(roster.participants[client].key, envelope, client)
    message = decode(kind, envelope.payload)
    require(
        message.client == client,
        Rule.MEMBER,
        f"client {client!r} sent a message in the name of client {message.client!r}",
    )
    return message
