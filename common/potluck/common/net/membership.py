"""Members of a federation: a document that the federation root signs, and statements that members
sign.

The federation root is an Ed25519 key that the operator keeps away from the coordinator. The
document binds clients to their hosts and their signing keys. TLS certificates are not part of it,
so they can be renewed without a new document. Each new document has the next *epoch*; a process
that has seen one rejects older ones (`MembershipInForce`). The holder of the root can invent
members: if the coordinator holds the root, signatures prove nothing against the coordinator.

Everything that is signed is `statement(purpose, fields)`: the text `potluck/v1/PURPOSE`, then each
field. Text and fields are each preceded by their length in bytes, as 8 bytes, big-endian. So
different lists of fields never have the same bytes, and a signature for one purpose is not valid
for another. The root signs one field: the document as JSON without blanks, with the fields in the
order of the classes below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.names import Name

MEMBERSHIP: Final = "membership"
PROFILE: Final = "profile"

LONGEST_RECORD: Final = timedelta(days=366)
"""Maximum duration of a record; a document with a longer one is refused."""

ENDS_SOON: Final = timedelta(days=30)
"""Time before a record's end at which warnings begin."""

MAXIMUM_BYTES: Final = 3 << 20
"""Maximum size of a document, which is sent as one message. Enough for about 14,000 members."""

_PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
_Epoch = Annotated[int, Field(ge=1, le=2**53)]


class MemberRecord(BaseModel):
    """The signing key of a client on a host, valid for at most 366 days.

    public_key: 32 bytes of Ed25519 as lower-case hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: Name
    host: Name
    public_key: _PublicKey
    not_before: AwareDatetime
    not_after: AwareDatetime

    @model_validator(mode="after")
    def _ends(self) -> Self:
        lasts = self.not_after - self.not_before
        if not timedelta(0) < lasts <= LONGEST_RECORD:
            raise ValueError(
                f"the record of client '{self.client}' is valid for {lasts.days} days, but at "
                f"most {LONGEST_RECORD.days} days are allowed; renew it with `potluck pki member`"
            )
        return self

    def key(self) -> Ed25519PublicKey:
        """Return the member's public key."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key))


class Revocation(BaseModel):
    """A member key that is revoked from an epoch on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    client: Name
    public_key: _PublicKey
    epoch: _Epoch


class MembershipDocument(BaseModel):
    """The members of a federation, one record for each client, sorted by client.

    epoch: number that grows with every document. revoked: all keys that were revoked up to now; no
    record contains one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    federation: Name
    epoch: _Epoch
    members: tuple[MemberRecord, ...] = ()
    revoked: tuple[Revocation, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        clients = [each.client for each in self.members]
        if clients != sorted(set(clients)):
            raise ValueError(
                "the members are not sorted by client, or a client has two records; make the "
                "list with `potluck pki member`"
            )
        revoked = {(each.client, each.public_key) for each in self.revoked}
        for each in self.members:
            if (each.client, each.public_key) in revoked:
                raise ValueError(
                    f"the record of client '{each.client}' has a revoked key; make a record with "
                    "another key with `potluck pki member`"
                )
        if any(each.epoch > self.epoch for each in self.revoked):
            raise ValueError(
                "a revocation has a later epoch than the member list; make the list with "
                "`potluck pki member`"
            )
        return self

    def statement(self) -> bytes:
        """Return the statement that the root signs for this document."""
        return statement(MEMBERSHIP, [self.model_dump_json()])


class SignedMembership(BaseModel):
    """members.json: a document with the root's signature over its statement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    document: MembershipDocument
    signature: _Signature

    @classmethod
    def make(cls, root: Ed25519PrivateKey, document: MembershipDocument) -> SignedMembership:
        """Sign a document."""
        return cls(document=document, signature=root.sign(document.statement()).hex())

    def to_bytes(self) -> bytes:
        """Return the text of members.json."""
        return self.model_dump_json(indent=1).encode() + b"\n"


class Members:
    """The members of a federation at an epoch, from a document that the federation root has
    signed."""

    def __init__(self, document: MembershipDocument) -> None:
        self.federation = document.federation
        self.epoch = document.epoch
        self.digest = hashlib.sha256(document.statement()).digest()
        """SHA-256 digest of the document's statement, 32 bytes."""
        self.records: Mapping[str, MemberRecord] = {each.client: each for each in document.members}
        """Records by client, sorted."""
        self.revoked = frozenset((each.client, each.public_key) for each in document.revoked)
        """Revoked keys, as pairs of client and public key."""

    @cached_property
    def hosts(self) -> Mapping[str, str]:
        """Host of each member, by client."""
        return {client: record.host for client, record in self.records.items()}

    def record(self, client: str, at: datetime) -> MemberRecord:
        """Return the record of a client. Raises IdentityError unless the client is a member at the
        time `at`."""
        record = self.records.get(client)
        if record is None:
            raise IdentityError(
                f"client '{client}' has no record in membership epoch {self.epoch}; add it with "
                "`potluck pki member`",
                client=client,
            )
        if not record.not_before <= at <= record.not_after:
            raise IdentityError(
                f"the member record of client '{client}' is valid from {record.not_before} to "
                f"{record.not_after}, but now it is {at}; renew it with `potluck pki member`, or "
                "set the clock",
                client=client,
            )
        return record

    def verify(self, client: str, signed: bytes, signature: bytes, at: datetime) -> None:
        """Raise IdentityError unless the client is a member at the time `at` and `signature` is its
        signature."""
        try:
            self.record(client, at).key().verify(signature, signed)
        except InvalidSignature:
            what = "a signature that is not from its member key" if signature else "no signature"
            raise IdentityError(
                f"client '{client}' sent {what}; set `member_key` in the host's configuration to "
                "the key of the client's member record",
                client=client,
            ) from None


def troubles_of(members: Members | None, clients: Iterable[str], now: datetime) -> list[str]:
    """Return a line, with a remedy, for each client that is not a member or whose record expires
    soon."""
    if members is None:
        return ["this process has no member list yet; give the coordinator members.json"]
    lines: list[str] = []
    for client in clients:
        try:
            record = members.record(client, now)
        except IdentityError as error:
            lines.append(error.message)
            continue
        if record.not_after - now < ENDS_SOON:
            lines.append(
                f"the member record of client '{client}' ends on {record.not_after:%Y-%m-%d}; "
                "renew it with `potluck pki renew-members`"
            )
    return lines


def statement(purpose: str, fields: Sequence[str]) -> bytes:
    """Return the bytes to sign for a purpose; see the module's docstring."""
    parts = [f"potluck/v1/{purpose}", *fields]
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8, "big") + part for part in encoded)


def profile_statement(
    *,
    federation: str,
    client: str,
    data_epoch: int,
    signal: str,
    parameters_json: str,
    payload_json: str,
) -> bytes:
    """Return the statement that a member signs when it discloses a profile.

    The statement does not name a run: like the profile, the signature is valid for all runs.
    """
    fields = [federation, client, str(data_epoch), signal, parameters_json, payload_json]
    return statement(PROFILE, fields)


def load_members(path: Path, root: Path, *, federation: str) -> Members:
    """Return the members in a file, verified with the root's public key.

    Raises ConfigurationError if a file can't be read, and the errors of `verified_members`.
    """
    key = load_public_key(root)
    return verified_members(read_file(path), key, federation=federation, source=str(path))


def verified_members(
    data: bytes, root: Ed25519PublicKey, *, federation: str, source: str
) -> Members:
    """Return the members in the text of a members.json. source: origin of the text, for messages.

    Raises ConfigurationError if the document is malformed or has a record that lasts too long,
    IdentityError if the root did not sign it or it belongs to another federation.
    """
    signed = _parsed(data, source)
    document = signed.document
    try:
        root.verify(bytes.fromhex(signed.signature), document.statement())
    except InvalidSignature:
        raise IdentityError(
            f"{source}: the member list is not signed by the federation root that is configured "
            "on this machine; get members.json and root.pub from the operator"
        ) from None
    if document.federation != federation:
        raise IdentityError(
            f"{source}: the member list is of federation '{document.federation}', not of "
            f"'{federation}'; get members.json of '{federation}' from the operator"
        )
    return Members(document)


def read_membership(path: Path) -> MembershipDocument:
    """Return the document in a members.json, without verifying signatures. Raises
    ConfigurationError."""
    return _parsed(read_file(path), str(path)).document


def _parsed(data: bytes, source: str) -> SignedMembership:
    if len(data) > MAXIMUM_BYTES:
        raise ConfigurationError(
            f"{source} has {len(data)} bytes; a member list may have at most {MAXIMUM_BYTES}"
        )
    try:
        return SignedMembership.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ConfigurationError(
            f"{source}: {place}: {fault['msg'].removeprefix('Value error, ')}"
        ) from None


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public key as written in records."""
    return key.public_key().public_bytes_raw().hex()


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Return an Ed25519 key in PEM form. Raises ConfigurationError."""
    try:
        key = load_pem_private_key(read_file(path), password=None)
    except (UnsupportedAlgorithm, TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(
            f"{path} is not an unencrypted Ed25519 key in PEM form; "
            "make one with `potluck pki member`",
            path=path,
        )
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """Return an Ed25519 public key in PEM form. Raises ConfigurationError."""
    try:
        key = load_pem_public_key(read_file(path))
    except (UnsupportedAlgorithm, TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigurationError(
            f"{path} is not an Ed25519 public key in PEM form; "
            "copy root.pub of the federation here",
            path=path,
        )
    return key


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises ConfigurationError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}", path=path) from None
