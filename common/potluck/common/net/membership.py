"""Members of a federation: records that its root signed, and statements that members sign.

The federation root is an Ed25519 key that the operator keeps away from the coordinator. A record
binds a client, its host and its signing key; TLS certificates are not part of it, so they rotate
freely. The holder of the root can invent members: where that is the coordinator, signatures prove
nothing against it.

Everything signed is `statement(purpose, fields)`: the text `potluck/v1/PURPOSE`, then each field,
every one of them preceded by its length in bytes as 8 bytes, big-endian. No two lists of fields
have the same bytes, and no signature for one purpose is good for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.names import Name

RECORD = "member-record"
PROFILE = "profile"

_PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


class MemberRecord(BaseModel):
    """The record that a client of a federation, on a host, signs with a key during a period.

    public_key: 32 bytes of Ed25519 as lower-case hexadecimal digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    federation: Name
    client: Name
    host: Name
    public_key: _PublicKey
    not_before: AwareDatetime
    not_after: AwareDatetime

    def statement(self) -> bytes:
        """The statement that the root signs. Times are ISO 8601 in UTC, to the second."""
        period = (self.not_before, self.not_after)
        times = [at.astimezone(UTC).isoformat(timespec="seconds") for at in period]
        return statement(RECORD, [self.federation, self.client, self.host, self.public_key, *times])

    def key(self) -> Ed25519PublicKey:
        """The member's public key."""
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key))


class SignedRecord(BaseModel):
    """A record with the root's signature over its statement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: MemberRecord
    signature: _Signature

    @classmethod
    def make(cls, root: Ed25519PrivateKey, record: MemberRecord) -> SignedRecord:
        """Sign a record."""
        return cls(record=record, signature=root.sign(record.statement()).hex())


class MemberFile(BaseModel):
    """members.json: the records of a federation, one for each client."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    federation: Name
    members: tuple[SignedRecord, ...] = ()

    def with_member(self, signed: SignedRecord) -> MemberFile:
        """The same file with one record added or replaced, sorted by client."""
        others = [each for each in self.members if each.record.client != signed.record.client]
        ordered = sorted([*others, signed], key=lambda each: each.record.client)
        return MemberFile(federation=self.federation, members=tuple(ordered))


class Members:
    """The members of a federation, by client; each record has been verified."""

    def __init__(self, records: Iterable[MemberRecord]) -> None:
        self._records: Mapping[str, MemberRecord] = {each.client: each for each in records}

    @property
    def hosts(self) -> Mapping[str, str]:
        """The host of each member."""
        return {client: record.host for client, record in self._records.items()}

    def verify(self, client: str, signed: bytes, signature: bytes, at: datetime) -> None:
        """Raises IdentityError unless the client is a member at that time and signed this."""
        record = self._records.get(client)
        if record is None:
            raise IdentityError(
                f"client '{client}' has no member record; add it with `potluck pki member`",
                client=client,
            )
        if not record.not_before <= at <= record.not_after:
            raise IdentityError(
                f"the member record of client '{client}' is valid from {record.not_before} to "
                f"{record.not_after} only; renew it with `potluck pki member`",
                client=client,
            )
        try:
            record.key().verify(signature, signed)
        except InvalidSignature:
            what = "another signature" if signature else "no signature"
            raise IdentityError(
                f"client '{client}' sent {what} than that of its member key; set `member_key` in "
                "its configuration to the key its record names",
                client=client,
            ) from None


def statement(purpose: str, fields: Sequence[str]) -> bytes:
    """The bytes to sign for a purpose; see the module's text."""
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
    """The statement that a member signs when it discloses a profile.

    It names no run: like the disclosure, the signature is good for all runs.
    """
    fields = [federation, client, str(data_epoch), signal, parameters_json, payload_json]
    return statement(PROFILE, fields)


def load_members(path: Path, root: Path, *, federation: str) -> Members:
    """The members in a file, each record verified with the root's public key.

    Raises ConfigurationError for files that can't be read, IdentityError for a record that the
    root did not sign, or of another federation.
    """
    key = load_public_key(root)
    members = read_member_file(path).members
    for signed in members:
        record = signed.record
        try:
            key.verify(bytes.fromhex(signed.signature), record.statement())
        except InvalidSignature:
            raise IdentityError(
                f"{path}: the record of client '{record.client}' is not signed by {root}; make it "
                "with `potluck pki member` in that root's folder",
                client=record.client,
            ) from None
        if record.federation != federation:
            raise IdentityError(
                f"{path}: the record of client '{record.client}' is of federation "
                f"'{record.federation}', this is '{federation}'",
                client=record.client,
            )
    return Members(signed.record for signed in members)


def read_member_file(path: Path) -> MemberFile:
    """A members.json; nothing is verified. Raises ConfigurationError."""
    try:
        return MemberFile.model_validate_json(_read(path))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ConfigurationError(f"{path}: {place}: {fault['msg']}", path=path) from None


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """An Ed25519 key in PEM form. Raises ConfigurationError."""
    try:
        key = load_pem_private_key(_read(path), password=None)
    except (UnsupportedAlgorithm, TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(
            f"{path} is no unencrypted Ed25519 key in PEM form; make one with `potluck pki member`",
            path=path,
        )
    return key


def load_public_key(path: Path) -> Ed25519PublicKey:
    """An Ed25519 public key in PEM form. Raises ConfigurationError."""
    try:
        key = load_pem_public_key(_read(path))
    except (UnsupportedAlgorithm, TypeError, ValueError):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigurationError(
            f"{path} is no Ed25519 public key in PEM form; copy root.pub of the federation here",
            path=path,
        )
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}", path=path) from None
