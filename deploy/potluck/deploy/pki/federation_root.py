"""The federation root: the Ed25519 key that says who is a member, and the records it signs.

root.key            the root; stays with the operator, away from the coordinator
root.pub            its public half; for the coordinator
members.json        the signed records; for the coordinator
members/CLIENT.key  a member's own key; for the host that holds the client, nobody else
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from potluck.common.errors import ConfigurationError, StorageError
from potluck.common.names import is_name
from potluck.common.net.identity import expand_clients
from potluck.common.net.key_files import write_whole
from potluck.common.net.membership import (
    MemberFile,
    MemberRecord,
    SignedRecord,
    load_private_key,
    read_member_file,
)
from potluck.deploy.pki.authority import BACKDATED

MEMBER_DAYS = 3650


def create_root(folder: Path, federation: str, *, force: bool = False) -> list[Path]:
    """Make a federation root in `folder`; the files it wrote.

    Raises ConfigurationError for a bad name, or where there is a root and `force` is not set: its
    records would stop counting.
    """
    if not is_name(federation):
        raise ConfigurationError(
            f"federation name {federation[:80]!r} is not allowed: use lower-case letters, digits, "
            "'.', '_' and '-', starting with a letter or digit, 63 characters at most"
        )
    secret, public, members = _paths(folder)
    if secret.exists() and not force:
        raise ConfigurationError(
            f"{secret} exists already; use --force to replace it, and renew all member records"
        )
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    file = MemberFile(federation=federation)
    _write_all([(secret, _secret(key), 0o600), (public, pem, 0o644), (members, _text(file), 0o644)])
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
            _write_all([(key_path, _secret(Ed25519PrivateKey.generate()), 0o600)])
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
    _write_all([(path, _text(file), 0o644)])
    return keys


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "root.key", folder / "root.pub", folder / "members.json"


def _secret(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _text(file: MemberFile) -> bytes:
    return file.model_dump_json(indent=1).encode() + b"\n"


def _write_all(files: Sequence[tuple[Path, bytes, int]]) -> None:
    try:
        for path, data, mode in files:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, data, mode)
    except OSError as error:
        raise StorageError(
            f"{error.filename or files[0][0]} can't be written ({error.strerror})"
        ) from error
