"""A client's session as immutable values: a class for each stage, and a step's result.

Later stages hold fewer secrets: a client drops its own keys once it has its masks, and all other
secrets once it has given its shares.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.secagg.protocol.policy.ledger import Ledger, LedgerEntry
from potluck.secagg.protocol.policy.one_set import keeps_to_one_set
from potluck.secagg.protocol.policy.sum_policy import ClientPolicy, Expectation
from potluck.secagg.protocol.primitives.agreement import (
    SessionKeys,
    SharePair,
)
from potluck.secagg.protocol.primitives.masks import Mask, Words, add_masks
from potluck.secagg.protocol.primitives.sharing import Random
from potluck.secagg.protocol.primitives.thresholds import colluding_clients
from potluck.secagg.protocol.rules import Refusal
from potluck.secagg.protocol.wire.messages import (
    Abort,
    CertifiedSet,
    Envelope,
    Header,
)
from potluck.secagg.protocol.wire.transcript import (
    FederationRoot,
    Roster,
)


@dataclass(frozen=True, kw_only=True)
class SumParty:
    """A client with its member key and policy, for all its sessions under one membership."""

    client: str
    key: Ed25519PrivateKey = field(repr=False)
    root: FederationRoot
    policy: ClientPolicy = field(default_factory=ClientPolicy)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The inputs of a step, other than session and message.

    now: a time with time zone. random: `os.urandom` except in tests. ledger: the ledger with all
    entries that any session of this client has written so far. revoked: pairs of client and member
    key revoked so far, also since the session began.
    """

    now: datetime
    random: Random
    ledger: Ledger = field(default_factory=Ledger)
    revoked: Container[tuple[str, str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The fields that all stages share: the client, the header, the client's expectation.

    certified: certified sets of earlier sessions, from the invitation.
    """

    party: SumParty
    header: Header
    header_sha256: bytes
    expected: Expectation
    certified: tuple[CertifiedSet, ...] = ()

    @property
    def one_set(self) -> bool:
        """True if the client's input may be summed over only one set of clients."""
        return self.party.policy.one_set and keeps_to_one_set(self.header, self.party.policy)

    @property
    def client(self) -> str:
        """Id of the client whose session it is."""
        return self.party.client


@dataclass(frozen=True, kw_only=True)
class Advertised:
    """Stage: the client waits for the roster."""

    agreed: Agreed
    keys: SessionKeys
    advert: Envelope


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Stage: the client waits for its neighbours' shares. channels: shared secret of the channel
    keys, by client.
    """

    agreed: Agreed
    keys: SessionKeys
    roster: Roster
    own_pair: SharePair
    channels: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Accusing:
    """Stage: the client could not decrypt another client's share. It waits for the message that the
    other client has signed.
    """

    agreed: Agreed
    roster: Roster
    accused: str
    channel_key: X25519PrivateKey = field(repr=False)
    refusal: Refusal


@dataclass(frozen=True, kw_only=True)
class View:
    """The clients that have shared, and the shares of their secrets that this client holds."""

    roster: Roster
    sharers: tuple[str, ...]
    sharers_sha256: bytes
    held: Mapping[str, SharePair] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Stage: the client has all masks; it must encode, mask and upload its vector."""

    agreed: Agreed
    view: View
    masks: Mapping[str, tuple[Mask, ...]] = field(repr=False)

    @property
    def header(self) -> Header:
        """The session's header."""
        return self.agreed.header

    @property
    def clients(self) -> int:
        """Number of clients in the roster; fixed-point scales depend on it."""
        return len(self.view.roster.participants)

    @property
    def certain(self) -> int:
        """Minimum number of clients in a sum that don't collude with the coordinator."""
        header = self.header
        return header.quorum - colluding_clients(
            self.view.roster.listed_hosts, header.colluding_hosts
        )

    def add_masks(self, vector: str, words: Words, first: int = 0) -> None:
        """Mask words [first, first + words.size) of a vector, in place; safe for disjoint slices in
        several threads. Mask each word only once: from two masked inputs, their difference can be
        computed.
        """
        add_masks(words, self.masks[vector], first=first, cipher=self.header.cipher)


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """Stage: the client waits for the request for its consent. It has dropped its own keys."""

    agreed: Agreed
    view: View


@dataclass(frozen=True, kw_only=True)
class Consented:
    """Stage: the client has consented to one set, and won't consent to another. It waits for the
    certificate.
    """

    agreed: Agreed
    view: View
    survivors: tuple[str, ...]
    consent: bytes
    survivors_sha256: bytes


@dataclass(frozen=True, kw_only=True)
class Revealed:
    """Stage: the client has given its shares, and holds no secret any more."""

    survivors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Stage: the session is over without a sum. refusal: this client's refusal. abort: the
    coordinator's abort.
    """

    refusal: Refusal | None = None
    abort: Abort | None = None


ClientState = Advertised | Shared | Accusing | Masking | Uploaded | Consented | Revealed | Ended


@dataclass(frozen=True, kw_only=True)
class ClientSession:
    """A client's part of one session. heard: digest of the last message. said: the client's answer
    to that message.
    """

    session_id: bytes
    state: ClientState
    heard: bytes = b""
    said: tuple[Envelope, ...] = field(default=(), repr=False)

    @property
    def over(self) -> bool:
        """True once the session has ended."""
        return isinstance(self.state, Revealed | Ended)

    @property
    def header(self) -> Header | None:
        """The session's header, until it is over."""
        return None if isinstance(self.state, Revealed | Ended) else self.state.agreed.header

    @property
    def masking(self) -> Masking | None:
        """The masks, while the client must upload its vector; else None."""
        return self.state if isinstance(self.state, Masking) else None


@dataclass(frozen=True, kw_only=True)
class ClientStep:
    """Result of handling a message.

    entries: ledger entries; sync them to disk before `replies` are sent or, after a delivery,
    before any byte of the masked vector is sent. repeated: True if the message was answered before;
    send `replies` again and do nothing else. Above all, don't mask another vector.
    superseded: ids of this client's other sessions; forget them before `replies` are sent.
    """

    session: ClientSession
    replies: tuple[Envelope, ...] = ()
    entries: tuple[LedgerEntry, ...] = ()
    refusal: Refusal | None = None
    repeated: bool = False
    superseded: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The next stage and the replies to a message.

    refusal: set if the message broke a rule, but the session continues in order to find out whose
    fault it is.
    """

    state: ClientState
    replies: tuple[Envelope, ...] = ()
    entries: tuple[LedgerEntry, ...] = ()
    refusal: Refusal | None = None
