"""The federation root: the Ed25519 key that signs the records of a federation's members.

root.key            the root; stays with the operator, away from the coordinator
root.pub            its public half; for the coordinator
members.json        the signed records; for the coordinator
members/CLIENT.key  a member's own key; for the host that holds the client alone
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from potluck.common.errors import ConfigurationError
from potluck.common.names import is_name
from potluck.common.net.identity import expand_clients
from potluck.common.net.key_files import KEY_MODE, PUBLIC_MODE, private_pem, write_file
from potluck.common.net.membership import (
    MemberFile,
    MemberRecord,
    SignedRecord,
    load_private_key,
    read_member_file,
)
from potluck.deploy.pki.authority import BACKDATED, check_federation_name

MEMBER_DAYS = 3650


def create_root(folder: Path, federation: str, *, force: bool = False) -> list[Path]:
    """Make a federation root in `folder`; the files it wrote.

    Raises ConfigurationError for a bad name, or where there is a root and `force` is not set: its
    records would stop counting.
    """
    check_federation_name(federation)
    secret, public, members = _paths(folder)
    if secret.exists() and not force:
        raise ConfigurationError(
            f"{secret} exists already; use --force to replace it, and renew all member records"
        )
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    write_file(secret, private_pem(key), KEY_MODE)
    write_file(public, pem, PUBLIC_MODE)
    write_file(members, _text(MemberFile(federation=federation)), PUBLIC_MODE)
    return [secret, public, members]


def add_members(
    folder: Path,
    clients: Sequence[str],
    host: str,
    *,
    days: int = MEMBER_DAYS,
    now: datetime | None = None,
) -> list[Path]:
    """Sign a record for each client; make its key where there is none. The key files.

    A client that has a record gets a new one. Raises ConfigurationError for bad names or files.
    """
    if not is_name(host):
        raise ConfigurationError(f"{host[:80]!r} is no host name; use that of its certificate")
    secret, _, path = _paths(folder)
    root, file = load_private_key(secret), read_member_file(path)
    begin = (now or datetime.now(UTC)).replace(microsecond=0)
    keys: list[Path] = []
    for client in expand_clients(clients):
        key_path = folder / "members" / f"{client}.key"
        if not key_path.exists():
            write_file(key_path, private_pem(Ed25519PrivateKey.generate()), KEY_MODE)
        record = MemberRecord(
            federation=file.federation,
            client=client,
            host=host,
            public_key=load_private_key(key_path).public_key().public_bytes_raw().hex(),
            not_before=begin - BACKDATED,
            not_after=begin + timedelta(days=days),
        )
        file = file.with_member(SignedRecord.make(root, record))
        keys.append(key_path)
    write_file(path, _text(file), PUBLIC_MODE)
    return keys


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "root.key", folder / "root.pub", folder / "members.json"


def _text(file: MemberFile) -> bytes:
    return file.model_dump_json(indent=1).encode() + b"\n"
