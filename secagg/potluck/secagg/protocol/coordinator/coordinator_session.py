"""The coordinator's session as immutable values: a class for each stage, and a step's result.

No stage holds an input or a masked vector. Before the last stage, none holds data from which a mask
could be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from potluck.secagg.protocol.coordinator.unmasking import (
    Unmasking,
)
from potluck.secagg.protocol.policy.ledger import Hexadecimal
from potluck.secagg.protocol.rules import Refusal, Rule
from potluck.secagg.protocol.wire.evidence import Conviction
from potluck.secagg.protocol.wire.messages import (
    Abort,
    CertifiedSet,
    Endorsement,
    Envelope,
    Header,
    Reveal,
    Stage,
)
from potluck.secagg.protocol.wire.transcript import (
    CheckedAdvert,
    FederationRoot,
    Roster,
)


class SetCertificate(BaseModel):
    """A quorum's consents to the sum over a set, in the form that records and databases store.

    signatures: by client. Each signs the consent, which contains the digests and the set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    session_id: Hexadecimal
    clients: tuple[str, ...]
    roster_sha256: Hexadecimal
    sharers_sha256: Hexadecimal
    signatures: dict[str, Hexadecimal]

    def shown(self) -> CertifiedSet:
        """Return the certificate in the form that invitations contain."""
        return CertifiedSet(
            session_id=bytes.fromhex(self.session_id),
            clients=self.clients,
            endorsements=tuple(
                Endorsement(client, bytes.fromhex(signature))
                for client, signature in sorted(self.signatures.items())
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SessionSetup:
    """The clients of a session. invited: host by client. gone: the clients that will not answer any
    more, each with its refusal, or None if it sent no refusal.
    """

    header: Header
    header_sha256: bytes
    invited: Mapping[str, str]
    root: FederationRoot
    gone: Mapping[str, Refusal | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Advertising:
    """Collects adverts."""

    stage = Stage.ADVERTISE
    answers: Mapping[str, CheckedAdvert] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Collects shares in their signed messages."""

    stage = Stage.SHARE
    roster: Roster
    answers: Mapping[str, Envelope] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Uploading:
    """Collects the signed digests of masked vectors; the vectors themselves arrive elsewhere.

    shares: in the messages that the sharers signed. disputes: the accused client, by accuser.
    """

    stage = Stage.UPLOAD
    roster: Roster
    sharers: tuple[str, ...]
    sharers_sha256: bytes
    shares: Mapping[str, Envelope] = field(default_factory=dict)
    disputes: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Consenting:
    """Collects consents to sum the survivors' vectors."""

    stage = Stage.CONSENT
    roster: Roster
    sharers: tuple[str, ...]
    sharers_sha256: bytes
    survivors: tuple[str, ...]
    survivors_sha256: bytes
    answers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Revealing:
    """Collects shares of the secrets that mask the sum."""

    stage = Stage.REVEAL
    roster: Roster
    sharers: tuple[str, ...]
    sharers_sha256: bytes
    survivors: tuple[str, ...]
    survivors_sha256: bytes
    answers: Mapping[str, Reveal] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A session whose sum over `unmasking.survivors` can be unmasked."""

    unmasking: Unmasking


@dataclass(frozen=True, kw_only=True)
class Aborted:
    """A session that ended without a sum.

    suspects: clients that may have sent wrong shares. conviction: proof that a client sent a share
    that can't be decrypted. verdict: a serialised `GuiltyVerdict`, for others to check the
    conviction.
    """

    abort: Abort
    suspects: tuple[str, ...] = ()
    conviction: Conviction | None = None
    verdict: bytes = field(default=b"", repr=False)


Collecting = Advertising | Sharing | Uploading | Consenting | Revealing
CoordinatorState = Collecting | Finished | Aborted


@dataclass(frozen=True, kw_only=True)
class CoordinatorSession:
    """The coordinator's part of one session.

    heard: digests of the messages received, each with its client. certificate: certificate of the
    set that a quorum consented to; sync it to disk before sending the step's messages.
    """

    setup: SessionSetup
    state: CoordinatorState
    heard: frozenset[bytes] = frozenset()
    certificate: SetCertificate | None = None

    @property
    def over(self) -> bool:
        """True once the session has ended, with a sum or without."""
        return isinstance(self.state, Finished | Aborted)

    @property
    def session_id(self) -> bytes:
        """Id of this session."""
        return self.setup.header.session_id

    @property
    def refusals(self) -> Mapping[str, Refusal]:
        """Refusals, by client."""
        return {client: why for client, why in self.setup.gone.items() if why is not None}

    @property
    def awaited(self) -> tuple[str, ...]:
        """Clients that may still answer in this stage, sorted."""
        state = self.collecting
        if state is None:
            return ()
        gone = self.setup.gone
        return tuple(
            client
            for client in expected_clients(self.setup, state)
            if client not in state.answers and client not in gone
        )

    @property
    def collecting(self) -> Collecting | None:
        """The current stage; None once the session is over."""
        return None if isinstance(self.state, Finished | Aborted) else self.state

    @property
    def unmasking(self) -> Unmasking | None:
        """The masks to remove from the sum; None before the last stage ends."""
        return self.state.unmasking if isinstance(self.state, Finished) else None

    @property
    def aborted(self) -> Aborted | None:
        """The end of a session without a sum; None unless it was aborted."""
        return self.state if isinstance(self.state, Aborted) else None


@dataclass(frozen=True, kw_only=True)
class CoordinatorStep:
    """Result of handling a message or another event.

    messages: messages to send, with their clients. refusal: refusal of the received message, which
    then changed nothing.
    """

    session: CoordinatorSession
    messages: tuple[tuple[str, Envelope], ...] = ()
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Shortage:
    """The rule that a session would break if it continued with the clients that answered."""

    rule: Rule
    have: int
    need: int
    suspects: tuple[str, ...] = ()


def expected_clients(setup: SessionSetup, state: Collecting) -> Iterable[str]:
    """Return the clients whose answers a stage collects, sorted."""
    match state:
        case Advertising():
            return setup.invited
        case Sharing():
            return state.roster.participants
        case Uploading():
            return state.sharers
        case _:
            return state.survivors
