"""Secure sums in memory: a federation of clients, and sessions driven step by step by hand."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from potluck.common.net.membership import (
    MemberRecord,
    Members,
    MembershipDocument,
    public_text,
)
from potluck.secagg.protocol import (
    ClientPolicy,
    ClientSession,
    ClientStep,
    CoordinatorSession,
    CoordinatorStep,
    Envelope,
    Expectation,
    FederationRoot,
    Header,
    Ledger,
    MessageType,
    Purpose,
    Refusal,
    SetCertificate,
    Situation,
    SumParty,
    SumVector,
    Unmasking,
    VectorEncoding,
    client,
    complete_thresholds,
    coordinator,
    decode,
    encode,
)
from potluck.secagg.protocol.primitives.masks import word_dtype
from potluck.secagg.protocol.primitives.thresholds import assumed_colluding_hosts
from potluck.secagg.protocol.wire.messages import Shares, Stage
from potluck.secagg.protocol.wire.transcript import sign

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
ISSUED = int(NOW.timestamp())
COUNTS = SumVector(
    name="counts", length=5, modulus_bits=64, encoding=VectorEncoding.COUNTS, clip=2.0**40
)
BODY = SumVector(
    name="body", length=7, modulus_bits=32, encoding=VectorEncoding.FIXED_POINT, clip=0.25
)
HEAD = SumVector(name="head", length=5, modulus_bits=64, encoding=VectorEncoding.HEAD, clip=1.0)


def member_record(client: str, **changes: Any) -> MemberRecord:
    """Return the record of a client on its own host."""
    values: dict[str, Any] = {
        "client": client,
        "host": f"h-{client}",
        "public_key": public_text(member_key(client)),
        "not_before": NOW - timedelta(days=1),
        "not_after": NOW + timedelta(days=1),
    }
    return MemberRecord(**(values | changes))


def membership(*records: MemberRecord, **changes: Any) -> Members:
    """Return the members of the federation `f` at epoch 1."""
    ordered = tuple(sorted(records, key=lambda each: each.client))
    values: dict[str, Any] = {"federation": "f", "epoch": 1, "members": ordered}
    return Members(MembershipDocument(**(values | changes)))


def member_key(name: str, generation: int = 0) -> Ed25519PrivateKey:
    """Return a member's key; it depends only on the name and the number of rotations."""
    seed = name + "'" * generation
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.encode()).digest())


@dataclass
class Federation:
    """Clients `a`, `b`, …, each on its own host unless `hosts` says otherwise.

    epoch: membership's epoch. rotated: key rotations by client. strangers: non-members.
    """

    clients: int = 6
    purpose: Purpose = Purpose.HISTOGRAM
    hosts_of: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 1
    rotated: Mapping[str, int] = field(default_factory=dict)
    strangers: frozenset[str] = frozenset()
    policy: ClientPolicy = field(
        default_factory=lambda: ClientPolicy(
            least_hosts=4, disclosures=frozenset({"cells", "update"})
        )
    )

    @cached_property
    def names(self) -> list[str]:
        width = 1 if self.clients <= 26 else 3
        return [chr(97 + index) if width == 1 else f"c{index:03}" for index in range(self.clients)]

    @cached_property
    def hosts(self) -> dict[str, str]:
        return {name: self.hosts_of.get(name, f"h-{name}") for name in self.names}

    @cached_property
    def root(self) -> FederationRoot:
        records = [
            member_record(name, host=self.hosts[name], public_key=public_text(self._key(name)))
            for name in self.names
            if name not in self.strangers
        ]
        return FederationRoot(membership(*records, epoch=self.epoch))

    def _key(self, name: str) -> Ed25519PrivateKey:
        return member_key(name, self.rotated.get(name, 0))

    @cached_property
    def parties(self) -> dict[str, SumParty]:
        return {
            name: SumParty(
                client=name,
                key=self._key(name),
                root=self.root,
                policy=self.policy,
            )
            for name in self.names
        }

    def header(self, **changes: Any) -> Header:
        """Return a header that all clients accept."""
        thresholds = complete_thresholds(self.hosts.values())
        update = self.purpose is Purpose.UPDATE
        values: dict[str, Any] = {
            "federation": "f",
            "session_id": bytes(range(16)),
            "run": "run-1",
            "purpose": self.purpose,
            "subject": "labels",
            "disclosure": "update" if update else "cells",
            "vectors": (BODY, HEAD) if update else (COUNTS,),
            "metrics": ("accuracy",) if update else (),
            "weight_bound": 1000 if update else 0,
            "metric_bound": 1.0 if update else 0.0,
            "model_digest": bytes(32) if update else b"",
            "training_sha256": bytes(32) if update else b"",
            "least_hosts": self.policy.least_hosts,
            "colluding_hosts": assumed_colluding_hosts(len(set(self.hosts.values()))),
            "degree": thresholds.degree,
            "threshold": thresholds.threshold,
            "quorum": thresholds.quorum,
            "membership_epoch": self.root.members.epoch,
            "membership_sha256": self.root.members.digest,
            "issued_at": ISSUED,
            "expires_at": ISSUED + 600,
        }
        return Header(**(values | changes))

    def expected(self, header: Header, **changes: Any) -> Expectation:
        """Return the clients' expectation that a correct header meets."""
        values: dict[str, Any] = {
            "purpose": header.purpose,
            "input_id": f"input {header.model_digest.hex()}",
            "lengths": {vector.name: vector.length for vector in header.vectors},
            "model_digest": header.model_digest,
            "training_sha256": header.training_sha256,
            "metrics": header.metrics,
        }
        return Expectation(**(values | changes))

    def part(self, names: Collection[str]) -> Federation:
        """Return the same federation with only some clients connected."""
        part = replace(self, clients=len(names))
        part.__dict__["names"] = sorted(names)
        return part

    def run(self, header: Header | None = None, **options: Any) -> Run:
        """Return a new session after the invitations."""
        return Run(self, header or self.header(), **options)


@dataclass
class Run:
    """An active session. Messages wait in `pending` until `answer` delivers them; messages for
    clients that must not answer are lost.

    beside: all sessions of these clients, including this one.
    """

    federation: Federation
    header: Header
    seed: int = 1
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    certified: tuple[SetCertificate, ...] = ()
    inputs: Callable[[str, SumVector], NDArray[Any]] | None = None
    beside: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beside.append(self)
        self.generator = random.Random(self.seed)
        self.sessions: dict[str, ClientSession] = {}
        self.refusals: dict[str, Refusal] = {}
        self.rejected: list[Refusal] = []
        self.uploads: dict[str, dict[str, NDArray[Any]]] = {}
        self.plain: dict[str, dict[str, NDArray[Any]]] = {}
        step = coordinator.invite(
            self.header,
            self.federation.hosts,
            self.federation.root,
            certified=self.certified,
        )
        self.pending: dict[str, list[Envelope]] = {name: [] for name in self.federation.names}
        self.session: CoordinatorSession = step.session
        self._send(step)

    def situation(self, name: str) -> Situation:
        return Situation(
            now=NOW, random=self.generator.randbytes, ledger=self.ledgers.get(name, Ledger())
        )

    def tell(self, name: str, envelope: Envelope) -> ClientStep:
        """Return the client's answer without changing any state."""
        party = self.federation.parties[name]
        if envelope.type is MessageType.INVITATION:
            expected = self.federation.expected(self.header)
            others = [run.sessions[name] for run in self.beside if name in run.sessions]
            return client.begin(party, envelope, expected, self.situation(name), others=others)
        return client.handle(self.sessions[name], envelope, self.situation(name))

    def next(self, name: str) -> Envelope:
        """Remove and return the oldest pending message of a client."""
        envelope, *rest = self.pending[name]
        self.pending[name] = rest
        return envelope

    def take(self, name: str, step: ClientStep) -> None:
        """Apply a client's step: store its session, upload if requested, and send its replies."""
        for run in self.beside:
            if run.header.session_id in step.superseded:
                del run.sessions[name]
        self.sessions[name] = step.session
        ledger = self.ledgers.get(name, Ledger())
        self.ledgers[name] = ledger.with_entries(step.entries)
        if step.refusal is not None:
            self.refusals[name] = step.refusal
        replies, digest = step.replies, None
        # False for a repeated message: the input is masked only once.
        if step.session.masking is not None:
            digest = self.upload(name)
            vouched = client.uploaded(step.session, digest)
            self.sessions[name] = vouched.session
            replies = vouched.replies
        for reply in replies:
            self.hear(name, reply, digest)

    def hear(self, name: str, envelope: Envelope, upload_digest: bytes | None = None) -> None:
        """Let the coordinator process a message."""
        step = coordinator.receive(self.session, name, envelope, NOW, upload_digest=upload_digest)
        if step.refusal is not None:
            self.rejected.append(step.refusal)
        self.session = step.session
        self._send(step)

    def upload(self, name: str) -> bytes:
        """Mask the client's input; return the digest of the upload."""
        masking = self.sessions[name].masking
        assert masking is not None
        plain, masked = {}, {}
        for vector in self.header.vectors:
            plain[vector.name] = self._input(name, vector)
            masked[vector.name] = plain[vector.name].copy()
            masking.add_masks(vector.name, masked[vector.name])
        self.plain[name], self.uploads[name] = plain, masked
        return hashlib.sha256(b"".join(each.tobytes() for each in masked.values())).digest()

    def answer(self, names: Collection[str] | None = None, *, closing: bool = True) -> None:
        """Deliver pending messages to some clients, by default all; then end the stage."""
        before = self.session.state
        waiting = {name: len(self.pending[name]) for name in self.pending}
        for name, count in waiting.items():
            for _ in range(count):
                envelope = self.next(name)
                known = name in self.sessions or envelope.type is MessageType.INVITATION
                if known and (names is None or name in names):
                    self.take(name, self.tell(name, envelope))
        if closing and type(self.session.state) is type(before):
            self.close()

    def close(self) -> None:
        """End the stage, because its time is up."""
        step = coordinator.close(self.session)
        self.session = step.session
        self._send(step)

    def until(self, stage: Stage) -> Run:
        """Take honest steps until the coordinator's messages of a stage are pending."""
        while (now := self.session.collecting) is not None and now.stage is not stage:
            self.answer()
        return self

    def finish(self) -> Run:
        """Take honest steps until the session is over."""
        while not self.session.over:
            self.answer()
        return self

    def total_clients(self) -> tuple[str, ...]:
        """Return the clients whose inputs are in the sum."""
        unmasking = self.session.unmasking
        assert unmasking is not None
        return unmasking.survivors

    def total(self) -> dict[str, NDArray[Any]]:
        """Return the unmasked sum, by vector."""
        unmasking = self.session.unmasking
        assert unmasking is not None
        sums = self.masked_sum(unmasking)
        for vector, words in sums.items():
            unmasking.remove(vector, words)
        return sums

    def masked_sum(self, unmasking: Unmasking) -> dict[str, NDArray[Any]]:
        return {
            vector.name: np.sum(
                [self.uploads[name][vector.name] for name in unmasking.survivors],
                axis=0,
                dtype=word_dtype(vector.modulus_bits),
            )
            for vector in self.header.vectors
        }

    def true_sum(self, names: Collection[str]) -> dict[str, NDArray[Any]]:
        return {
            vector.name: np.sum(
                [self.plain[name][vector.name] for name in names],
                axis=0,
                dtype=word_dtype(vector.modulus_bits),
            )
            for vector in self.header.vectors
        }

    def is_exact(self) -> bool:
        """Return True if there is a sum and it equals that of the survivors' inputs."""
        unmasking = self.session.unmasking
        if unmasking is None:
            return False
        expected, found = self.true_sum(unmasking.survivors), self.total()
        return all(np.array_equal(expected[vector], found[vector]) for vector in expected)

    def fork(self) -> Run:
        """Return a copy that continues independently; this is possible because all states are
        values."""
        other = object.__new__(Run)
        other.__dict__.update(self.__dict__)
        for name in ("sessions", "refusals", "uploads", "plain", "ledgers", "pending"):
            setattr(other, name, dict(getattr(self, name)))
        other.rejected = list(self.rejected)
        other.generator = random.Random(self.seed)
        other.generator.setstate(self.generator.getstate())
        return other

    def _input(self, name: str, vector: SumVector) -> NDArray[Any]:
        if self.inputs is not None:
            return self.inputs(name, vector)
        draws = np.random.Generator(np.random.PCG64([ord(name[-1]), self.seed, vector.length]))
        return draws.integers(0, 1000, vector.length).astype(word_dtype(vector.modulus_bits))

    def _send(self, step: CoordinatorStep) -> None:
        for name, envelope in step.messages:
            self.pending[name] = [*self.pending[name], envelope]


def changed(envelope: Envelope, payload: bytes) -> Envelope:
    """Return the same envelope around another payload."""
    return replace(envelope, payload=payload)


def sabotage(run: Run, sender: str, garbage: Mapping[str, bytes]) -> None:
    """Let a client encrypt invented shares for some others, and sign them."""
    step = run.tell(sender, run.next(sender))
    [reply], run.sessions[sender] = step.replies, step.session
    message = decode(Shares, reply.payload)
    shares = tuple(
        replace(each, ciphertext=garbage.get(each.client, each.ciphertext))
        for each in message.shares
    )
    forged = sign(member_key(sender), reply.type, encode(replace(message, shares=shares)))
    run.hear(sender, forged)
