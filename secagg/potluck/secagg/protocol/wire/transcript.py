"""Signatures and digests of a session: over envelopes and sets of clients.

Signatures are Ed25519 over `FLSA/1|TYPE`, a zero byte, the payload's length as 8 bytes,
little-endian, and the payload as it was sent. Digests form a chain. Every advert contains the
header's digest. The roster's digest covers header and adverts, the sharers' digest covers the
roster, and the consent covers all of these and the set to be summed. So parties with different
views can't agree on a later message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from potluck.common.errors import IdentityError
from potluck.common.net.membership import MemberRecord, Members
from potluck.secagg.protocol.primitives.agreement_proof import check_knowledge
from potluck.secagg.protocol.primitives.graph import neighbours
from potluck.secagg.protocol.rules import BrokenRuleError, Rule, require
from potluck.secagg.protocol.wire.message_encoding import check_names, decode
from potluck.secagg.protocol.wire.messages import Advert, Envelope, Header, MessageType

_REMEMBERED: Final = 20_000
_ADVERTS_REMEMBERED: Final = 1_000


def signing_bytes(kind: MessageType, payload: bytes) -> bytes:
    """Return the bytes that the signature of a payload covers."""
    prefix = b"FLSA/1|" + kind.name.encode() + b"\0"
    return prefix + len(payload).to_bytes(8, "little") + payload


def sign(key: Ed25519PrivateKey, kind: MessageType, payload: bytes) -> Envelope:
    """Return a payload in an envelope, signed."""
    return Envelope(kind, payload, key.sign(signing_bytes(kind, payload)))


def verify(key: Ed25519PublicKey, envelope: Envelope, who: str) -> None:
    """Raise BrokenRuleError (signature) unless the key signed the envelope's payload."""
    try:
        key.verify(envelope.signature, signing_bytes(envelope.type, envelope.payload))
    except InvalidSignature:
        raise BrokenRuleError(
            Rule.SIGNATURE,
            f"the {envelope.type.name} message of client {who!r} is not signed "
            "with the client's member key",
        ) from None


class FederationRoot:
    """The members of an epoch, as the federation's root signed them.

    It remembers verified adverts and signatures for all clients and sessions of a process, since a
    valid signature stays valid. Safe to share among threads.
    """

    def __init__(self, members: Members) -> None:
        self.members = members
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._signed: set[bytes] = set()
        self._adverts: dict[Envelope, CheckedAdvert] = {}

    @property
    def federation(self) -> str:
        """The federation's name."""
        return self.members.federation

    def check_header(self, header: Header) -> None:
        """Raise BrokenRuleError (membership) unless a session has exactly these members."""
        ours, theirs = self.members.epoch, header.membership_epoch
        require(
            theirs >= ours,
            Rule.MEMBERSHIP,
            f"the session uses membership epoch {theirs}, but this client has seen the newer "
            f"epoch {ours}",
        )
        require(
            theirs <= ours,
            Rule.MEMBERSHIP,
            f"the session uses membership epoch {theirs}, but this client has epoch {ours}; give "
            "the client's host the newest members.json",
        )
        require(
            header.membership_sha256 == self.members.digest,
            Rule.MEMBERSHIP,
            f"the session and this client have different members in membership epoch {ours}",
        )

    def member(self, client: str, now: datetime) -> MemberRecord:
        """Return the record of a client; `now` has a time zone.

        Raises BrokenRuleError (member) unless the client is a member at that time.
        """
        try:
            return self.members.record(client, now)
        except IdentityError as error:
            raise BrokenRuleError(Rule.MEMBER, error.message) from None

    def key_of(self, record: MemberRecord) -> Ed25519PublicKey:
        """Return the member key in a record."""
        key = self._keys.get(record.public_key)
        if key is None:
            key = record.key()
            if len(self._keys) < _REMEMBERED:
                self._keys[record.public_key] = key
        return key

    def verify(self, record: MemberRecord, envelope: Envelope) -> None:
        """Raise BrokenRuleError (signature) unless the member signed the envelope's payload.

        A host receives the same adverts and consents once for each of its clients, so valid
        signatures are remembered.
        """
        signed = signing_bytes(envelope.type, envelope.payload)
        digest = hashlib.sha256(bytes.fromhex(record.public_key) + envelope.signature + signed)
        known = digest.digest()
        if known in self._signed:
            return
        verify(self.key_of(record), envelope, record.client)
        if len(self._signed) >= _REMEMBERED:
            self._signed.clear()
        self._signed.add(known)

    def checked_advert(self, envelope: Envelope) -> CheckedAdvert | None:
        """Return the result of an earlier check of this advert; None if there is none.

        The client's record may have expired since that check.
        """
        return self._adverts.get(envelope)

    def remember(self, checked: CheckedAdvert) -> None:
        """Remember a checked advert.

        Only a few are kept, since an advert is used in one session only.
        """
        if len(self._adverts) >= _ADVERTS_REMEMBERED:
            self._adverts.clear()
        self._adverts[checked.envelope] = checked


@dataclass(frozen=True)
class Participant:
    """A verified advert, with the member key. number: the place in the roster, from 1."""

    number: int
    advert: Advert
    record: MemberRecord
    key: Ed25519PublicKey


@dataclass(frozen=True)
class Roster:
    """The participants of a session, each advert verified; `digest` covers header and adverts."""

    header: Header
    header_sha256: bytes
    digest: bytes
    participants: Mapping[str, Participant]
    adverts: tuple[Envelope, ...]

    @cached_property
    def neighbours(self) -> Mapping[str, frozenset[str]]:
        """Each client's neighbours in the session's graph."""
        return neighbours(list(self.participants), self.header.degree, self.digest)

    def hosts(self, clients: Sequence[str] | frozenset[str]) -> set[str]:
        """Return the distinct hosts of some participants."""
        return {self.participants[client].record.host for client in clients}

    @cached_property
    def listed_hosts(self) -> list[str]:
        """The host of each participant."""
        return [each.record.host for each in self.participants.values()]


def knowledge_context(header_sha256: bytes, client: str, mask_key: bytes, seed: bytes) -> bytes:
    """Return the bytes to which an advert's `channel_proof` is bound. seed: the commitment to the
    client's seed."""
    return header_sha256 + mask_key + seed + client.encode()


def check_advert(
    envelope: Envelope, header_sha256: bytes, root: FederationRoot, now: datetime
) -> CheckedAdvert:
    """Read and verify an advert of a member. Raises BrokenRuleError."""
    found = root.checked_advert(envelope)
    if found is None:
        found = _check_advert(envelope, root, now)
        root.remember(found)
    else:
        root.member(found.advert.client, now)
    who = found.advert.client
    require(
        found.advert.header_sha256 == header_sha256,
        Rule.HEADER,
        f"client {who!r} answered another invitation",
    )
    return found


def _check_advert(envelope: Envelope, root: FederationRoot, now: datetime) -> CheckedAdvert:
    """Check the parts of an advert that don't depend on the session."""
    require(
        envelope.type is MessageType.ADVERT,
        Rule.MALFORMED,
        "every message in a roster must be an advert",
    )
    advert = decode(Advert, envelope.payload)
    who = advert.client
    record = root.member(who, now)
    root.verify(record, envelope)
    # Otherwise one client could pose as two, or receive its own key as another client's.
    require(
        advert.mask_key != advert.channel_key,
        Rule.DUPLICATE,
        f"client {who!r} must have two different keys for masks and channels",
    )
    # Otherwise evidence against a client with a key made from another client's would disclose what
    # the accuser shares with that other client.
    check_knowledge(
        advert.channel_key,
        advert.channel_proof,
        knowledge_context(advert.header_sha256, who, advert.mask_key, advert.commitment),
    )
    return CheckedAdvert(envelope, advert, record, root.key_of(record))


@dataclass(frozen=True)
class CheckedAdvert:
    """An advert with a valid signature: its envelope, its decoded form, and its client's record."""

    envelope: Envelope
    advert: Advert
    record: MemberRecord
    key: Ed25519PublicKey


def check_distinct(adverts: Sequence[CheckedAdvert]) -> None:
    """Raise BrokenRuleError (duplicate) if two clients share a key or a commitment."""
    distinct: dict[str, set[bytes] | set[str]] = {
        "mask key": {each.advert.mask_key for each in adverts},
        "channel key": {each.advert.channel_key for each in adverts},
        "commitment": {each.advert.commitment for each in adverts},
        "member key": {each.record.public_key for each in adverts},
    }
    for what, different in distinct.items():
        require(len(different) == len(adverts), Rule.DUPLICATE, f"two clients have the same {what}")


def build_roster(header: Header, header_sha256: bytes, adverts: Sequence[CheckedAdvert]) -> Roster:
    """Build the roster of adverts, which are sorted by client. Raises BrokenRuleError."""
    check_names([each.advert.client for each in adverts], "the adverts in the roster")
    check_distinct(adverts)
    digest = _digest(
        b"roster",
        header_sha256,
        [each.envelope.payload + each.envelope.signature for each in adverts],
    )
    participants = {
        each.advert.client: Participant(number, each.advert, each.record, each.key)
        for number, each in enumerate(adverts, 1)
    }
    envelopes = tuple(each.envelope for each in adverts)
    return Roster(header, header_sha256, digest, participants, envelopes)


def sharers_digest(roster_sha256: bytes, clients: Sequence[str]) -> bytes:
    """Return the digest of the set of clients that sent shares."""
    return _digest(b"sharers", roster_sha256, [client.encode() for client in clients])


def survivors_digest(sharers_sha256: bytes, clients: Sequence[str]) -> bytes:
    """Return the digest of the set whose sum is requested."""
    return _digest(b"survivors", sharers_sha256, [client.encode() for client in clients])


def _digest(label: bytes, before: bytes, items: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256(label + before + len(items).to_bytes(8, "little"))
    for item in items:
        digest.update(len(item).to_bytes(8, "little") + item)
    return digest.digest()
