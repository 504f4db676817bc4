"""The messages of a session, as immutable classes.

Each class is one message of `protos/potluck/rpc/v1/secure_aggregation.proto`, field by field; the
schema explains the fields. `message_encoding` turns them into bytes and back, and enforces the
lengths and ranges given here on incoming ones. Lists of clients are sorted, without repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import ClassVar, Final

from potluck.common.net.protocol import SECURE_SUM_VERSION
from potluck.secagg.protocol.primitives.masks import StreamCipher

VERSION: Final = SECURE_SUM_VERSION
SESSION_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
MAXIMUM_CLIENTS: Final = 2**16
"""Maximum number of clients in a session; sums of counts are exact up to this number."""


class MessageType(IntEnum):
    """The type of a payload; part of the signed bytes."""

    INVITATION = 1
    ADVERT = 2
    ROSTER = 3
    SHARES = 4
    DELIVERY = 5
    MASKED_INPUT = 6
    SURVIVORS = 7
    CONSENT = 8
    CERTIFICATE = 9
    REVEAL = 10
    REFUSAL = 11
    ABORT = 12
    DISPUTE = 13
    EVIDENCE = 14


class Stage(StrEnum):
    """The stages of a session, in order; aborts name them."""

    ADVERTISE = "advertise"
    SHARE = "share"
    UPLOAD = "upload"
    CONSENT = "consent"
    REVEAL = "reveal"


class Purpose(IntEnum):
    """The kind of input that is summed."""

    HISTOGRAM = 1
    UPDATE = 2
    METRIC = 3


class VectorEncoding(IntEnum):
    """The encoding of a vector's numbers; see `vectors`."""

    COUNTS = 1
    FIXED_POINT = 2
    HEAD = 3


class Secret(IntEnum):
    """The two secrets of a client that are split into shares."""

    SEED = 1
    MASK_KEY = 2


@dataclass(frozen=True)
class Envelope:
    """A message with its signature: 64 bytes of Ed25519; empty from the coordinator."""

    type: MessageType
    payload: bytes
    signature: bytes = b""


@dataclass(frozen=True, kw_only=True)
class SumVector:
    """A vector of words, summed modulo 2^modulus_bits. scale: 0 means the largest possible.

    The schema calls it a lane.
    """

    name: str
    length: int
    modulus_bits: int
    encoding: VectorEncoding
    clip: float
    scale: float = 0.0

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.length * self.modulus_bits // 8


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise that clients add so that a sum of counts has discrete Laplace noise.

    epsilon: ε of the sum. sensitivity: 1 or 2, the L1 distance between counts of neighbouring data.
    contributors: number of clients whose shares together make the whole noise.
    """

    epsilon: float
    sensitivity: int
    contributors: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """The terms of a session, fixed before it begins; their digest is in all signed bytes.

    Defaults are for sums that need no such field. Times are seconds since 1970. `degree`: 0 for
    the complete graph.
    """

    version: int = VERSION
    federation: str
    session_id: bytes
    run: str = ""
    round: int = 0
    attempt: int = 1
    purpose: Purpose
    subject: str
    disclosure: str
    vectors: tuple[SumVector, ...]
    metrics: tuple[str, ...] = ()
    weight_bound: int = 0
    metric_bound: float = 0.0
    cipher: StreamCipher = StreamCipher.AES_256_CTR
    least_hosts: int
    colluding_hosts: int
    degree: int = 0
    threshold: int
    quorum: int
    noise: Noise | None = None
    model_digest: bytes = b""
    training_sha256: bytes = b""
    membership_epoch: int = 0
    membership_sha256: bytes = bytes(DIGEST_BYTES)
    issued_at: int
    expires_at: int

    def vector(self, name: str) -> SumVector:
        """Return a vector by its name. Raises KeyError."""
        for vector in self.vectors:
            if vector.name == name:
                return vector
        raise KeyError(name)

    @property
    def upload_bytes(self) -> int:
        """Bytes of a client's upload: all vectors' words."""
        return sum(vector.size for vector in self.vectors)


@dataclass(frozen=True)
class Invitation:
    """The invitation of a client. header: a serialised `Header`. certified: sets of earlier
    sessions that may have had the same inputs.
    """

    TYPE: ClassVar = MessageType.INVITATION
    header: bytes
    certified: tuple[CertifiedSet, ...] = ()


@dataclass(frozen=True)
class CertifiedSet:
    """The set of an earlier session, with a quorum's consents to its sum."""

    session_id: bytes
    clients: tuple[str, ...]
    endorsements: tuple[Endorsement, ...]


@dataclass(frozen=True)
class Advert:
    """A client's public keys for one session.

    channel_proof: proof that the client knows the private key of `channel_key`; see
    `knowledge_context`. revealed: the sessions with possibly the same input in which the client has
    given shares. With the advert, the client promises two things: it has not given shares in other
    sessions of this kind, and from now on it gives shares only in this session.
    """

    TYPE: ClassVar = MessageType.ADVERT
    header_sha256: bytes
    client: str
    mask_key: bytes
    channel_key: bytes
    commitment: bytes
    channel_proof: bytes
    revealed: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class RosterMessage:
    """All adverts, as their clients signed them."""

    TYPE: ClassVar = MessageType.ROSTER
    session_id: bytes
    adverts: tuple[Envelope, ...]


@dataclass(frozen=True)
class SealedShare:
    """Shares of both secrets of one client for another, encrypted."""

    client: str
    ciphertext: bytes


@dataclass(frozen=True)
class Shares:
    """A client's shares for its neighbours."""

    TYPE: ClassVar = MessageType.SHARES
    roster_sha256: bytes
    client: str
    shares: tuple[SealedShare, ...]


@dataclass(frozen=True)
class Delivery:
    """The clients that have sent shares, and their shares for the receiver."""

    TYPE: ClassVar = MessageType.DELIVERY
    session_id: bytes
    sharers: tuple[str, ...]
    shares: tuple[SealedShare, ...]


@dataclass(frozen=True)
class MaskedInput:
    """A client's confirmation of its upload."""

    TYPE: ClassVar = MessageType.MASKED_INPUT
    sharers_sha256: bytes
    client: str
    upload_digest: bytes


@dataclass(frozen=True)
class Survivors:
    """The clients whose uploads are complete."""

    TYPE: ClassVar = MessageType.SURVIVORS
    session_id: bytes
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Consent:
    """The statement that the sum over a set may be unmasked; the same bytes for all clients."""

    TYPE: ClassVar = MessageType.CONSENT
    roster_sha256: bytes
    sharers_sha256: bytes
    survivors_sha256: bytes


@dataclass(frozen=True)
class Endorsement:
    """A client's signature over the consent."""

    client: str
    signature: bytes


@dataclass(frozen=True)
class Certificate:
    """A quorum's consents to the sum over a set."""

    TYPE: ClassVar = MessageType.CERTIFICATE
    session_id: bytes
    endorsements: tuple[Endorsement, ...]


@dataclass(frozen=True)
class RevealedShare:
    """A share of one of a client's secrets."""

    owner: str
    secret: Secret
    share: bytes = field(repr=False)


@dataclass(frozen=True)
class Reveal:
    """The shares that a client discloses to the coordinator, one for each owner of a secret."""

    TYPE: ClassVar = MessageType.REVEAL
    survivors_sha256: bytes
    client: str
    shares: tuple[RevealedShare, ...]


@dataclass(frozen=True)
class RefusalMessage:
    """A client's refusal, which ends its session and names the broken rule.

    accused: client whose share can't be decrypted, if that is the reason.
    """

    TYPE: ClassVar = MessageType.REFUSAL
    session_id: bytes
    client: str
    rule: str
    detail: str
    accused: str = ""


@dataclass(frozen=True)
class Abort:
    """The coordinator's notice that the session ends without a sum.

    have, need: actual and required number of what `rule` counts. missing: clients that have not
    answered.
    """

    TYPE: ClassVar = MessageType.ABORT
    session_id: bytes
    stage: Stage
    have: int
    need: int
    missing: tuple[str, ...]
    rule: str


@dataclass(frozen=True)
class Dispute:
    """The `Shares` that the accused has signed, sent to the accuser."""

    TYPE: ClassVar = MessageType.DISPUTE
    session_id: bytes
    shares: Envelope


@dataclass(frozen=True)
class Evidence:
    """The secret that the channel keys of two clients agree on, with an `AgreementProof` of it."""

    TYPE: ClassVar = MessageType.EVIDENCE
    roster_sha256: bytes
    client: str
    accused: str
    point: bytes
    challenge: bytes
    response: bytes


@dataclass(frozen=True)
class GuiltyVerdict:
    """All data needed to check which client sent a share that can't be decrypted."""

    header: bytes
    adverts: tuple[Envelope, ...]
    shares: Envelope
    evidence: Envelope


Message = (
    Invitation
    | Advert
    | RosterMessage
    | Shares
    | Delivery
    | MaskedInput
    | Survivors
    | Consent
    | Certificate
    | Reveal
    | RefusalMessage
    | Abort
    | Dispute
    | Evidence
)
"""The messages that an envelope may hold."""
