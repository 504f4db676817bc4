"""A client's ledger of the sums that it took part in.

A ledger is immutable; the checks read it, `Ledger.with_entries` returns an extended copy. The state
machine returns entries together with a reply. Its caller writes them to disk, synced, before it
sends the reply. So a process that is killed in between has recorded more than it sent, never less.

Entries are made at two moments. At the *upload* the privacy loss of a noisy sum is charged, because
from then on other clients can complete the sum without this one. Without noise, the session is
recorded, since its sum may be over a set that this client never consented to. At the *reveal* a set
is recorded as released, whatever the coordinator claims later: any two sets of one cohort that are
certified or rebuilt have an honest client in common that reveals for one of them only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from fractions import Fraction
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter

from potluck.secagg.protocol.policy.sum_policy import Expectation
from potluck.secagg.protocol.rules import BrokenRuleError, Rule
from potluck.secagg.protocol.wire.messages import Header, Purpose

_VECTOR: Final = b"potluck masked vector 1\0"

Adjacency = Literal["add-remove", "replace"]
"""Difference in data that noise hides: one sample more or less, or one sample exchanged."""

Hexadecimal = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SessionView(_Entry):
    """Facts that later determine whether an upload of this client is in the session's sum.

    clients: clients of its roster. quorum: number of consents that certify a set.
    renouncers_needed: if this number of clients give no shares, a sum is impossible. The digests
    cover the roster and the sharers that this client has seen.
    """

    clients: tuple[str, ...]
    quorum: int
    renouncers_needed: int
    roster_sha256: Hexadecimal
    sharers_sha256: Hexadecimal


class Upload(_Entry):
    """A masked vector that was sent.

    vector: digest of everything that determines an update's vector (`vector_sha256`); empty for
    label counts, and for updates of earlier releases. data, settings, weight_bound: facts about an
    update, which `pins` compares. epsilon: recorded privacy loss. sensitivity, adjacency:
    difference in data that the noise hides. All three are None without noise. view: facts that
    later show if the upload is in a sum; None if that need not be found out.
    """

    kind: Literal["upload"] = "upload"
    session_id: Hexadecimal
    input_id: str
    run: str = ""
    vector: Hexadecimal = ""
    data: str = ""
    settings: Hexadecimal = ""
    weight_bound: int | None = None
    epsilon: float | None
    sensitivity: int | None = None
    adjacency: Adjacency | None = None
    view: SessionView | None = None
    at: AwareDatetime


class Settled(_Entry):
    """Entry: states the only set in which an upload can have been summed.

    clients: the set; empty if the upload is not in a sum and never will be.
    """

    kind: Literal["settled"] = "settled"
    session_id: Hexadecimal
    clients: tuple[str, ...]
    at: AwareDatetime


class SumRelease(_Entry):
    """Entry: the client gave its shares for a set. clients: host by client, of the set."""

    kind: Literal["release"] = "release"
    session_id: Hexadecimal
    input_id: str
    federation: str
    run: str
    round: int
    purpose: Purpose
    model_digest: Hexadecimal = ""
    subject: str
    disclosure: str
    clients: dict[str, str]
    epsilon: float | None
    sensitivity: int | None = None
    adjacency: Adjacency | None = None
    at: AwareDatetime


LedgerEntry = Upload | SumRelease | Settled

_ENTRY: TypeAdapter[LedgerEntry] = TypeAdapter(Annotated[LedgerEntry, Field(discriminator="kind")])


def entry_from_json(text: str | bytes) -> LedgerEntry:
    """Parse the JSON that `entry.model_dump_json()` gave. Raises pydantic's ValidationError."""
    return _ENTRY.validate_json(text)


class Ledger(_Entry):
    """All entries of one client, oldest first. epsilon_budget: budget of all noisy sums."""

    entries: tuple[Annotated[LedgerEntry, Field(discriminator="kind")], ...] = ()
    epsilon_budget: float = 0.0

    def with_entries(self, entries: Iterable[LedgerEntry]) -> Ledger:
        """Return a copy of this ledger, extended by these entries."""
        return self.model_copy(update={"entries": (*self.entries, *entries)})

    @property
    def releases(self) -> list[SumRelease]:
        """The releases, oldest first."""
        return [each for each in self.entries if isinstance(each, SumRelease)]

    @property
    def uploads(self) -> list[Upload]:
        """The uploads, oldest first."""
        return [each for each in self.entries if isinstance(each, Upload)]

    @property
    def losses(self) -> list[Fraction]:
        """The privacy loss of each noisy sum; each ε is read as its printed decimal number."""
        charged = (each.epsilon for each in self.uploads if each.epsilon is not None)
        return [Fraction(repr(epsilon)) for epsilon in charged]

    @property
    def spent(self) -> Fraction:
        """The privacy loss so far."""
        return sum(self.losses, Fraction(0))

    @property
    def settled(self) -> dict[str, tuple[str, ...]]:
        """The only set that a settled session can have summed, by session id.

        An empty set means that the upload is not in a sum.
        """
        return {each.session_id: each.clients for each in self.entries if isinstance(each, Settled)}

    def open_uploads(self, input_id: str) -> list[Upload]:
        """Return the noiseless uploads of an input that may be in a sum unknown to this client."""
        known = {each.session_id for each in self.entries if not isinstance(each, Upload)}
        return [
            each
            for each in self.uploads
            if each.input_id == input_id and each.epsilon is None and each.session_id not in known
        ]

    def summed(self, input_id: str) -> list[Upload]:
        """Return the noiseless uploads of an input that are, or may be, in a sum."""
        settled = self.settled
        return [
            each
            for each in self.uploads
            if each.input_id == input_id
            and each.epsilon is None
            and settled.get(each.session_id, (each.input_id,))
        ]

    def sets_of(self, input_id: str) -> set[frozenset[str]]:
        """Return the sets over which this input is known to have been summed without noise."""
        exact = {
            each.session_id
            for each in self.uploads
            if each.input_id == input_id and each.epsilon is None
        }
        sets = {
            frozenset(each.clients)
            for each in self.entries
            if not isinstance(each, Upload) and each.session_id in exact
        }
        return sets - {frozenset[str]()}


def check_charge(ledger: Ledger, header: Header) -> None:
    """Raise BrokenRuleError (budget) if a noisy sum would exceed the client's privacy budget."""
    if header.noise is None:
        return
    budget = Fraction(repr(ledger.epsilon_budget))
    left = budget - ledger.spent
    if Fraction(repr(header.noise.epsilon)) > left:
        raise BrokenRuleError(
            Rule.BUDGET,
            f"the sum costs ε = {header.noise.epsilon:g}, but of epsilon_budget = "
            f"{ledger.epsilon_budget:g} only {float(left):g} is left; the data owner can raise "
            "epsilon_budget",
        )


def vector_sha256(header: Header) -> bytes:
    """Return the digest of everything that determines an update's vector, except the client's data.

    It covers the training, the model, the weight bound, the names, lengths, bits, clips and scales
    of all vectors, the normalisation and metrics in the head, and their bound. Empty for label
    counts, whose vector is always the same within a data epoch. The number of invited clients is
    not included: it only sets how finely the vector is rounded.
    """
    if header.purpose is not Purpose.UPDATE:
        return b""
    vectors = [
        [
            *(vector.name, vector.length, vector.modulus_bits, vector.encoding.name),
            *(repr(vector.clip), *([repr(vector.scale)] if vector.scale else [])),
        ]
        for vector in header.vectors
    ]
    terms = {
        "training": header.training_sha256.hex(),
        "model": header.model_digest.hex(),
        "weight_bound": header.weight_bound,
        "lanes": vectors,  # a stored name
        "metrics": list(header.metrics),
        "metric_bound": repr(header.metric_bound),
    }
    return hashlib.sha256(_VECTOR + json.dumps(terms, sort_keys=True).encode()).digest()


def upload_entry(
    header: Header, expected: Expectation, view: SessionView | None, at: datetime
) -> Upload:
    """Return the ledger entry that must be on disk before the masked vector is sent."""
    return Upload(
        session_id=header.session_id.hex(),
        input_id=expected.input_id,
        run=header.run,
        vector=vector_sha256(header).hex(),
        data=expected.data,
        settings=expected.settings_sha256.hex(),
        weight_bound=header.weight_bound if expected.data else None,
        view=view,
        at=at,
        **_noise_of(header),
    )


def release_entry(
    header: Header, input_id: str, clients: Mapping[str, str], at: datetime
) -> SumRelease:
    """Return the ledger entry that must be on disk before the client reveals its shares."""
    return SumRelease(
        session_id=header.session_id.hex(),
        input_id=input_id,
        federation=header.federation,
        run=header.run,
        round=header.round,
        purpose=header.purpose,
        model_digest=header.model_digest.hex(),
        subject=header.subject,
        disclosure=header.disclosure,
        clients=dict(clients),
        at=at,
        **_noise_of(header),
    )


def _noise_of(header: Header) -> dict[str, Any]:
    noise = header.noise
    if noise is None:
        return {"epsilon": None}
    adjacency: Adjacency = "add-remove" if noise.sensitivity == 1 else "replace"
    return {"epsilon": noise.epsilon, "sensitivity": noise.sensitivity, "adjacency": adjacency}
