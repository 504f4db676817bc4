"""The federation root: the Ed25519 key that signs the list of a federation's members.

root.key                 the root's private key; the operator keeps it away from the coordinator
root.pub                 its public key; for the coordinator and the hosts
members.json             the members, signed; each change makes its next epoch
members/CLIENT.key       a member's own key; only for the host that holds the client
members/next/CLIENT.key  the key that will replace it; for that host, before the switch to it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from potluck.client.disclosure.member_keys import NEXT
from potluck.common.errors import ConfigurationError
from potluck.common.names import is_name
from potluck.common.net.identity import expand_clients
from potluck.common.net.key_files import KEY_MODE, PUBLIC_MODE, private_pem, write_file
from potluck.common.net.membership import (
    LONGEST_RECORD,
    MAXIMUM_BYTES,
    MemberRecord,
    MembershipDocument,
    Revocation,
    SignedMembership,
    load_members,
    load_private_key,
    public_text,
    read_membership,
)
from potluck.deploy.pki.authority import BACKDATED, check_federation_name

MEMBER_DAYS = 365


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    """Clients with new records. epoch: epoch of the document with the records.

    keys: their key files.
    """

    epoch: int
    keys: tuple[Path, ...]


def create_root(folder: Path, federation: str, *, force: bool = False) -> list[Path]:
    """Make a federation root in `folder`. Return the written files.

    Raises ConfigurationError for a bad name, or if a root exists and `force` is not set: its
    members would become invalid.
    """
    check_federation_name(federation)
    secret, public, members = _paths(folder)
    if secret.exists() and not force:
        raise ConfigurationError(
            f"the file {secret} already exists; add --force to replace the root, then add all "
            "members again"
        )
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_file(secret, private_pem(key), KEY_MODE)
    write_file(public, pem, PUBLIC_MODE)
    document = MembershipDocument(federation=federation, epoch=1)
    write_file(members, SignedMembership.make(key, document).to_bytes(), PUBLIC_MODE)
    return [secret, public, members]


def add_members(
    folder: Path,
    clients: Sequence[str],
    host: str,
    *,
    days: int = MEMBER_DAYS,
    now: datetime | None = None,
) -> Enrolled:
    """Give each client a record in the next epoch, and make its key if it has none.

    A client that has a record gets a new one. Raises ConfigurationError for bad names or files, for
    too many days, and for a revoked key.
    """
    if not is_name(host):
        raise ConfigurationError(
            f"{host[:80]!r} is not a valid host name; use the name in the host's certificate"
        )
    _check_days(days)
    names = expand_clients(clients)
    for client in names:
        key_path = _key_path(folder, client)
        if not key_path.exists():
            write_file(key_path, private_pem(Ed25519PrivateKey.generate()), KEY_MODE)

    def record(client: str, document: MembershipDocument) -> MemberRecord:
        key = load_private_key(_key_path(folder, client))
        _refuse_revoked(document, client, public_text(key), folder)
        return _record(client, host, key, days=days, now=now)

    document = _next_epoch(folder, dict.fromkeys(names, record))
    return Enrolled(epoch=document.epoch, keys=tuple(_key_path(folder, each) for each in names))


def renew_members(
    folder: Path,
    clients: Sequence[str] = (),
    *,
    soon: timedelta,
    days: int = MEMBER_DAYS,
    now: datetime | None = None,
) -> tuple[MembershipDocument, list[str]]:
    """Give members new records with their current keys.

    These are the named clients, or all clients whose records end within `soon`. Return the document
    that is valid afterwards, and the renewed clients. Raises ConfigurationError.
    """
    at = now or datetime.now(UTC)
    document = read_membership(_paths(folder)[2])
    known = {each.client: each for each in document.members}
    names: list[str] = list(expand_clients(clients)) or [
        client for client, each in known.items() if each.not_after - at < soon
    ]
    _require_members(document, names, folder)

    def record(client: str, _: MembershipDocument) -> MemberRecord:
        begin = at.replace(microsecond=0)
        changes = {"not_before": begin - BACKDATED, "not_after": _end(begin, days)}
        return known[client].model_copy(update=changes)

    if names:
        document = _next_epoch(folder, dict.fromkeys(names, record))
    return document, names


def make_next_keys(folder: Path, clients: Sequence[str]) -> list[Path]:
    """Make the next key of each member. It becomes valid when `use_next_keys` is called.

    An existing next key stays. Return the key files. Raises ConfigurationError.
    """
    names = expand_clients(clients)
    _require_members(read_membership(_paths(folder)[2]), names, folder)
    files = [_next_path(folder, client) for client in names]
    for path in files:
        if not path.exists():
            write_file(path, private_pem(Ed25519PrivateKey.generate()), KEY_MODE)
    return files


def use_next_keys(
    folder: Path, clients: Sequence[str], *, days: int = MEMBER_DAYS, now: datetime | None = None
) -> Enrolled:
    """Replace the current keys of members by their next keys, and issue new records for these.

    Raises ConfigurationError if a client has no next key, or no record.
    """
    names = expand_clients(clients)
    known = {each.client: each for each in read_membership(_paths(folder)[2]).members}
    _require_members(read_membership(_paths(folder)[2]), names, folder)
    for client in names:
        if not _next_path(folder, client).exists():
            raise ConfigurationError(
                f"client {client} has no next key; create one with `potluck pki rotate {folder} "
                f"{client}`, and copy it to host {known[client].host} first"
            )

    def record(client: str, document: MembershipDocument) -> MemberRecord:
        key = load_private_key(_next_path(folder, client))
        _refuse_revoked(document, client, public_text(key), folder)
        return _record(client, known[client].host, key, days=days, now=now)

    document = _next_epoch(folder, dict.fromkeys(names, record))
    for client in names:
        _next_path(folder, client).replace(_key_path(folder, client))
    return Enrolled(epoch=document.epoch, keys=tuple(_key_path(folder, each) for each in names))


def revoke_members(folder: Path, clients: Sequence[str]) -> MembershipDocument:
    """Revoke members' keys and remove their records, from the next epoch on.

    The members' key files are deleted as well, so that a client that is added again gets a new key.
    Raises ConfigurationError for clients that are not members.
    """
    secret, _, path = _paths(folder)
    document, names = _current(folder), set(expand_clients(clients))
    _require_members(document, sorted(names), folder)
    leaving = [each for each in document.members if each.client in names]
    epoch = document.epoch + 1
    revoked = [
        Revocation(client=each.client, public_key=each.public_key, epoch=epoch) for each in leaving
    ]
    document = MembershipDocument(
        federation=document.federation,
        epoch=epoch,
        members=tuple(each for each in document.members if each.client not in names),
        revoked=(*document.revoked, *revoked),
    )
    _write(path, load_private_key(secret), document)
    for client in names:
        _key_path(folder, client).unlink(missing_ok=True)
        _next_path(folder, client).unlink(missing_ok=True)
    return document


def _next_epoch(
    folder: Path, records: dict[str, Callable[[str, MembershipDocument], MemberRecord]]
) -> MembershipDocument:
    """Write the document's next epoch, with some records added or replaced. Return it."""
    secret, _, path = _paths(folder)
    document = _current(folder)
    made = {each.client: each for each in document.members}
    made |= {client: make(client, document) for client, make in records.items()}
    document = MembershipDocument(
        federation=document.federation,
        epoch=document.epoch + 1,
        members=tuple(made[client] for client in sorted(made)),
        revoked=document.revoked,
    )
    _write(path, load_private_key(secret), document)
    return document


def _write(path: Path, root: Ed25519PrivateKey, document: MembershipDocument) -> None:
    text = SignedMembership.make(root, document).to_bytes()
    if len(text) > MAXIMUM_BYTES:
        raise ConfigurationError(
            f"{path} would have {len(text)} bytes, but hosts accept at most {MAXIMUM_BYTES}; "
            "revoke members that have left"
        )
    write_file(path, text, PUBLIC_MODE)


def _current(folder: Path) -> MembershipDocument:
    """Return the current document, after a check that this root signed it.

    The check prevents the root from signing a successor of another root's document.
    """
    _, public, path = _paths(folder)
    document = read_membership(path)
    load_members(path, public, federation=document.federation)
    return document


def _record(
    client: str, host: str, key: Ed25519PrivateKey, *, days: int, now: datetime | None
) -> MemberRecord:
    begin = (now or datetime.now(UTC)).replace(microsecond=0)
    return MemberRecord(
        client=client,
        host=host,
        public_key=public_text(key),
        not_before=begin - BACKDATED,
        not_after=_end(begin, days),
    )


def _end(begin: datetime, days: int) -> datetime:
    _check_days(days)
    return begin + timedelta(days=days)


def _check_days(days: int) -> None:
    most = (LONGEST_RECORD - BACKDATED).days
    if not 1 <= days <= most:
        raise ConfigurationError(
            f"a member record can't be valid for {days} days; choose 1 to {most} days, and renew "
            "records in time with `potluck pki renew-members`"
        )


def _require_members(document: MembershipDocument, clients: Sequence[str], folder: Path) -> None:
    members = {each.client for each in document.members}
    for client in clients:
        if client not in members:
            raise ConfigurationError(
                f"client {client} is not a member; add the client with `potluck pki member "
                f"{folder} {client} --host NAME`"
            )


def _refuse_revoked(
    document: MembershipDocument, client: str, public_key: str, folder: Path
) -> None:
    if any((client, public_key) == (each.client, each.public_key) for each in document.revoked):
        raise ConfigurationError(
            f"the key in {_key_path(folder, client)} was revoked; delete the file and run the "
            "command again, which creates a new key"
        )


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "root.key", folder / "root.pub", folder / "members.json"


def _key_path(folder: Path, client: str) -> Path:
    return folder / "members" / f"{client}.key"


def _next_path(folder: Path, client: str) -> Path:
    return folder / "members" / NEXT / f"{client}.key"
