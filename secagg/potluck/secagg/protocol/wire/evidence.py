"""Evidence that a client sent a share that can't be decrypted.

The accused has signed the encrypted share. The accuser discloses the secret on which their two
channel keys agree, with a proof. So any party can try to decrypt the share, and no key is
disclosed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.secagg.protocol.primitives.agreement import agree, open_pair
from potluck.secagg.protocol.primitives.agreement_proof import (
    AgreementProof,
    prove_agreement,
    proven_agreement,
)
from potluck.secagg.protocol.primitives.sharing import Random
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require
from potluck.secagg.protocol.wire.message_encoding import decode, encode
from potluck.secagg.protocol.wire.messages import (
    Envelope,
    Evidence,
    GuiltyVerdict,
    Header,
    MessageType,
    Shares,
)
from potluck.secagg.protocol.wire.transcript import (
    FederationRoot,
    Roster,
    build_roster,
    check_advert,
    verify,
)


@dataclass(frozen=True)
class Conviction:
    """Proof that `accused` sent `accuser` a share that can't be decrypted."""

    accused: str
    accuser: str


def gather_evidence(
    roster: Roster,
    accused: str,
    accuser: str,
    channel_key: X25519PrivateKey,
    shares: Envelope,
    random: Random,
) -> Evidence:
    """Return the accuser's evidence. shares: the message that the accused has signed.

    Raises BrokenRuleError unless the accused signed a share that can't be decrypted. If the accused
    signed a valid share, the coordinator has changed it on the way. Evidence would then disclose
    the secret shared with an honest client.
    """
    sealed = _signed_for(roster, accused, accuser, shares)
    other = roster.participants[accused].advert.channel_key
    require(
        not _opens(roster, accused, accuser, sealed, agree(channel_key, other)),
        Rule.SHARE,
        f"the coordinator changed the share that client {accused!r} had signed",
    )
    context = _context(roster, accused, accuser)
    proof = prove_agreement(channel_key, other, context, random)
    return Evidence(roster.digest, accuser, accused, proof.point, proof.challenge, proof.response)


def check_evidence(roster: Roster, evidence: Evidence, shares: Envelope) -> Conviction:
    """Return the conviction that evidence proves. shares: the `Shares` of the accused, as it signed
    them.

    Raises BrokenRuleError if nothing is proven against the accused.
    """
    accused, accuser = evidence.accused, evidence.client
    named = roster.participants.keys() >= {accused, accuser}
    require(named, Rule.EVIDENCE, "the evidence names a client outside the session")
    require(
        evidence.roster_sha256 == roster.digest,
        Rule.EVIDENCE,
        "the evidence belongs to another session",
    )
    sealed = _signed_for(roster, accused, accuser, shares)
    secret = proven_agreement(
        AgreementProof(evidence.point, evidence.challenge, evidence.response),
        roster.participants[accuser].advert.channel_key,
        roster.participants[accused].advert.channel_key,
        _context(roster, accused, accuser),
    )
    require(
        not _opens(roster, accused, accuser, sealed, secret),
        Rule.EVIDENCE,
        f"the share of client {accused!r} can be decrypted, although client {accuser!r} claims "
        "the opposite",
    )
    return Conviction(accused, accuser)


def check_verdict(data: bytes, root: FederationRoot, at: datetime) -> Conviction:
    """Check a serialised `GuiltyVerdict`, as stored in session records; return its conviction.

    root: root with the session's members. at: a time during the session, when their records were
    valid. Raises BrokenRuleError if nothing is proven.
    """
    verdict = decode(GuiltyVerdict, data)
    header = decode(Header, verdict.header)
    root.check_header(header)
    header_sha256 = hashlib.sha256(verdict.header).digest()
    adverts = [check_advert(each, header_sha256, root, at) for each in verdict.adverts]
    roster = build_roster(header, header_sha256, adverts)
    evidence = decode(Evidence, verdict.evidence.payload)
    require(
        verdict.evidence.type is MessageType.EVIDENCE,
        Rule.EVIDENCE,
        "the verdict lacks a message with evidence",
    )
    require(
        evidence.client in roster.participants,
        Rule.EVIDENCE,
        "the evidence is from a client outside the session",
    )
    verify(roster.participants[evidence.client].key, verdict.evidence, evidence.client)
    return check_evidence(roster, evidence, verdict.shares)


def verdict_bytes(roster: Roster, shares: Envelope, evidence: Envelope) -> bytes:
    """Return all data that `check_verdict` needs, serialised."""
    return encode(GuiltyVerdict(encode(roster.header), roster.adverts, shares, evidence))


def _signed_for(roster: Roster, sender: str, receiver: str, shares: Envelope) -> bytes:
    """Return the ciphertext that a client has signed for another. Raises BrokenRuleError."""
    require(
        shares.type is MessageType.SHARES, Rule.EVIDENCE, "the evidence lacks a message with shares"
    )
    verify(roster.participants[sender].key, shares, sender)
    message = decode(Shares, shares.payload)
    require(
        message.client == sender and message.roster_sha256 == roster.digest,
        Rule.EVIDENCE,
        "the shares in the evidence are from another client or another session",
    )
    sealed = [each.ciphertext for each in message.shares if each.client == receiver]
    if len(sealed) != 1:
        raise BrokenRuleError(
            Rule.EVIDENCE, f"client {sender!r} has signed no share for client {receiver!r}"
        )
    return sealed[0]


def _opens(roster: Roster, sender: str, receiver: str, sealed: bytes, secret: bytes) -> bool:
    numbers = [roster.participants[client].number for client in (sender, receiver)]
    try:
        open_pair(sealed, secret, roster.digest, *numbers)
    except BrokenRuleError:
        return False
    return True


def _context(roster: Roster, accused: str, accuser: str) -> bytes:
    return roster.digest + accused.encode() + b"\0" + accuser.encode()
