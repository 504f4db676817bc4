"""The documents that commit a coordinator to the selections of a run, and their digests.

Each attempt at a round has three documents, each of which names the digest of the one before, so
that the documents of a run form a hash chain:

1. `Opening`: the inputs of the selection, before hosts commit to their shares of the seed.
2. `Attendees`: the clients to choose from, with the hosts' commitments, before any share is known.
3. `Outcome`: the shares and the cohort.

A document is JSON with sorted keys and without blanks. Its digest is SHA-256 over a label, its
kind and its exact bytes; receivers parse these bytes and never encode them again.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from potluck.common.disclosure import canonical_json
from potluck.common.errors import ProtocolError
from potluck.common.names import Name
from potluck.common.net.membership import statement

_LABEL: Final = b"potluck selection 1\0"
_PURPOSE: Final = "selection"
"""Purpose of members' signatures, see `membership.statement`."""

SHARE_BYTES: Final = 32

_HEX: Final = "[0-9a-f]{64}"
Digest = Annotated[str, StringConstraints(pattern=f"^{_HEX}$")]
Share = Digest
_Signature = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{128})?$")]
_Run = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class BrokenSelectionError(ProtocolError):
    """A coordinator broke its commitment for a selection."""


def digest(kind: str, *parts: bytes) -> str:
    """Return the SHA-256 digest (hexadecimal) of these parts, for one kind of content.

    Different lists of parts are hashed as different bytes, and so are different kinds.
    """
    hashed = hashlib.sha256(_LABEL + kind.encode() + b"\0")
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()


def is_digest(text: str) -> bool:
    """Return True if a text has the form of a digest, a commitment or a share."""
    return re.fullmatch(_HEX, text) is not None


def genesis(run: str) -> str:
    """Return the digest that a run's first document names as the document before it."""
    return digest("run", run.encode())


class Document(BaseModel):
    """One link of a run's chain. previous: digest of the document before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    previous: Digest

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Return the document in these bytes. Raises BrokenSelectionError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise BrokenSelectionError(
                f"the coordinator sent a malformed {cls.__name__.lower()} of a selection: field "
                f"{place}: {fault['msg']}"
            ) from None

    def encode(self) -> bytes:
        """Return the bytes of the document."""
        return canonical_json(self.model_dump(mode="json")).encode()

    @classmethod
    def digest_of(cls, text: bytes) -> str:
        """Return the digest of a document's bytes."""
        return digest(cls.__name__.lower(), text)


class Opening(Document):
    """Commits to the inputs of a selection, except the clients to choose from.

    rounds: number of rounds of the run. count: maximum size of the cohort; 0 if the selector takes
    all clients. inputs_sha256: digest of all inputs, which the coordinator keeps. seed: seed of the
    selection; None if coordinator and hosts make one together. commitment: commitment to the
    coordinator's share of that seed; empty if the seed is given.
    """

    run: _Run
    rounds: int = Field(ge=1)
    round: int = Field(ge=1)
    attempt: int = Field(ge=1)
    selector: Annotated[str, StringConstraints(max_length=200)]
    count: int = Field(ge=0)
    inputs_sha256: Digest
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    commitment: Digest | Annotated[str, StringConstraints(max_length=0)] = ""

    @property
    def joint(self) -> bool:
        """True if coordinator and hosts make the seed together."""
        return self.seed is None


class Speaker(BaseModel):
    """The client that speaks for its host. commitment: commitment to the host's share of the seed;
    empty if the seed is given. signature: the client's signature over its receipt of the opening;
    empty without a member key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: Name
    commitment: Digest | Annotated[str, StringConstraints(max_length=0)] = ""
    signature: _Signature = ""


class Attendees(Document):
    """The clients to choose from, in roster order, and one speaker for each of their hosts.

    times: number of earlier selections of each client, if the selector depends on it; else None.
    """

    available: tuple[Name, ...] = Field(min_length=1)
    times: tuple[int, ...] | None = None
    speakers: tuple[Speaker, ...] = Field(min_length=1)


class Outcome(Document):
    """The cohort, in the order chosen, and the shares of the seed.

    share: the coordinator's share; empty if the seed is given. shares: the hosts' shares, by
    speaker; empty if the seed is given.
    """

    cohort: tuple[Name, ...] = Field(min_length=1)
    share: Share | Annotated[str, StringConstraints(max_length=0)] = ""
    shares: Mapping[Name, Share] = Field(default_factory=dict)


D = TypeVar("D", bound=Document)


def receipt(document_sha256: str, client: str, commitment: str = "") -> bytes:
    """Return the statement that a member signs for a document that it has received."""
    return statement(_PURPOSE, [document_sha256, client, commitment])


# The seed ---------------------------------------------------------------------------------------

COORDINATOR: Final = ""
"""Party name of the coordinator, in place of a client id, for its share of a seed."""


def commitment_to(share: str, opening: str, party: str) -> str:
    """Return the commitment to a share (hexadecimal). opening: for a host's share, digest of the
    opening; for the coordinator's, digest of the document before. party: client, or COORDINATOR."""
    return digest("share", opening.encode(), party.encode(), bytes.fromhex(share))


def share_of(secret: bytes, opening: str, client: str) -> str:
    """Return a host's share for one opening: HMAC-SHA256 of a secret that never leaves the host.

    So a host that restarts gives the same share again, and no two openings have the same share.
    """
    message = bytes.fromhex(digest("seed share", opening.encode(), client.encode()))
    return hmac.digest(secret, message, "sha256").hex()


def joint_seed(attendees: str, share: str, shares: Sequence[str]) -> int:
    """Return the seed that coordinator and hosts have made, in [0, 2^63).

    attendees: digest of the document with all commitments. share: the coordinator's share. shares:
    one for each speaker, in the document's order.
    """
    parts = [bytes.fromhex(each) for each in shares]
    made = digest("joint seed", bytes.fromhex(attendees), bytes.fromhex(share), *parts)
    return int(made[:16], 16) >> 1
