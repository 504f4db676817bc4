"""The federation's TLS authority, and the certificates it issues, as files in a folder.

All keys are P-256 and all signatures use SHA-256, since grpcio's handshake refuses Ed25519
certificates.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.common.errors import ConfigurationError
from potluck.common.names import is_name
from potluck.common.net.identity import (
    DIALLED,
    MAXIMUM_URI_BYTES,
    SPEAKING,
    Identity,
    Role,
    parse_claims,
)
from potluck.common.net.key_files import KEY_MODE, PUBLIC_MODE, private_pem, write_file
from potluck.deploy.pki.certificates import (
    federation_of,
    is_authority,
    read_certificate,
    sign_revocations,
)

AUTHORITY = "authority"
REGISTER = "issued"
"""Folder next to the authority, with every certificate that it issued, by serial number."""

REVOKED = "revoked.pem"
"""Revocation list next to the authority; empty at first."""

AUTHORITY_DAYS = 3650
LEAF_DAYS = 365
BACKDATED = timedelta(minutes=10)
"""Time before its issue from which a certificate is valid, because clocks differ."""

_HOST_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedFiles:
    """Paths of a certificate, its private key and the authority's certificate."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """A TLS authority's certificate with its key, to sign certificates."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    federation: str


def create_authority(
    folder: Path,
    federation: str,
    *,
    days: int = AUTHORITY_DAYS,
    force: bool = False,
    now: datetime | None = None,
) -> IssuedFiles:
    """Make a TLS authority in `folder`: authority.pem, authority.key and an empty revoked.pem.

    Raises ConfigurationError for a bad name or period, or if an authority exists and `force` is not
    set: every certificate it issued would stop working. Raises StorageError if writing fails.
    """
    check_federation_name(federation)
    files = _files(folder, AUTHORITY)
    _refuse_existing(files, force=force)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(NameOID.COMMON_NAME, "Potluck TLS authority"),
        ]
    )
    builder = (
        _builder(subject, subject, key.public_key(), _period(days, now))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
    )
    certificate = builder.sign(key, hashes.SHA256())
    since = (now or datetime.now(UTC)).replace(microsecond=0)
    revocations = sign_revocations(certificate, key, {}, number=0, now=since)
    _write_pair(files, key, certificate)
    write_file(folder / REVOKED, revocations, PUBLIC_MODE)
    return files


def check_federation_name(name: str) -> None:
    """Raise ConfigurationError if a federation can't have this name."""
    if not is_name(name):
        raise ConfigurationError(
            f"federation name {name[:80]!r} is not allowed: use lower-case letters, digits, "
            "'.', '_' and '-', starting with a letter or digit, 63 characters at most"
        )


def issue(
    folder: Path,
    role: Role,
    name: str,
    *,
    clients: Sequence[str] = (),
    hosts: Sequence[str] = (),
    days: int = LEAF_DAYS,
    force: bool = False,
    now: datetime | None = None,
) -> IssuedFiles:
    """Issue a certificate from the authority in `folder`, as NAME.pem and NAME.key in the folder.

    clients: clients of a host or a relay, as claims (`client-0:5`, `hospital-a`). hosts: DNS names
    and IP addresses at which hosts will dial the coordinator or the relay. The certificate's
    validity never ends after the authority's. Raises ConfigurationError or IdentityError if the
    request or the authority is invalid, or if the files exist and `force` is not set. Raises
    StorageError if writing fails.
    """
    authority = load_authority(folder)
    identity = Identity(
        federation=authority.federation, role=role, name=name, claims=parse_claims(clients)
    )
    check_request(identity, hosts)
    files = _files(folder, name)
    _refuse_existing(files, force=force)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = certify(authority, identity, key.public_key(), hosts=hosts, days=days, now=now)
    _write_pair(files, key, certificate)
    return files


def load_authority(folder: Path) -> Authority:
    """Load the authority in a folder, with its key. Raises ConfigurationError, IdentityError."""
    files = _files(folder, AUTHORITY)
    check_authority(folder)
    certificate = read_certificate(files.certificate)
    if not is_authority(certificate):
        raise ConfigurationError(f"{files.certificate} is not the certificate of an authority")
    try:
        key = load_pem_private_key(files.key.read_bytes(), password=None)
    except OSError as error:
        raise ConfigurationError(
            f"can't read the authority's key {files.key} ({error.strerror}); issue certificates "
            "on the machine with this key",
            path=files.key,
        ) from error
    except (UnsupportedAlgorithm, TypeError, ValueError) as error:
        raise ConfigurationError(f"{files.key} is not a private key in PEM form") from error
    matches = key.public_key() == certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not matches:
        raise ConfigurationError(
            f"the key {files.key} does not belong to the certificate {files.certificate}"
        )
    federation = federation_of(files.certificate, certificate)
    return Authority(folder=folder, certificate=certificate, key=key, federation=federation)


def check_authority(folder: Path) -> None:
    """Raise ConfigurationError unless there is an authority in a folder."""
    if not _files(folder, AUTHORITY).certificate.exists():
        raise ConfigurationError(
            f"{folder} has no authority; create one with `potluck pki init {folder} --federation "
            "NAME`",
            folder=folder,
        )


def certify(
    authority: Authority,
    identity: Identity,
    public_key: ec.EllipticCurvePublicKey,
    *,
    hosts: Sequence[str] = (),
    days: int = LEAF_DAYS,
    now: datetime | None = None,
) -> x509.Certificate:
    """Sign a certificate for a key and record it in the register; see `check_request`.

    Raises ConfigurationError for a bad period or host, or for an expired authority; StorageError
    if writing fails.
    """
    begin, end = _period(days, now)
    end = min(end, authority.certificate.not_valid_after_utc)
    if begin + BACKDATED >= end:
        raise ConfigurationError(
            f"the authority in {authority.folder} expired on {end:%Y-%m-%d}; create a new one "
            "with `potluck pki init`",
            folder=authority.folder,
        )
    builder = _leaf_builder(authority, identity, public_key, hosts, (begin, end))
    certificate = builder.sign(authority.key, hashes.SHA256())
    _enter(authority.folder, certificate)
    return certificate


def _leaf_builder(
    authority: Authority,
    identity: Identity,
    public_key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    period: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.federation),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, identity.role.value),
            x509.NameAttribute(NameOID.COMMON_NAME, identity.name),
        ]
    )
    usages = [ExtendedKeyUsageOID.SERVER_AUTH] if identity.role in DIALLED else []
    if identity.role is not Role.COORDINATOR:  # the coordinator never dials
        usages.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    names = [x509.UniformResourceIdentifier(identity.uri()), *map(_general_name, hosts)]
    return (
        _builder(subject, authority.certificate.subject, public_key, period)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )


def _enter(folder: Path, certificate: x509.Certificate) -> None:
    path = folder / REGISTER / f"{certificate.serial_number:x}.pem"
    write_file(path, certificate.public_bytes(Encoding.PEM), PUBLIC_MODE)


def check_request(identity: Identity, hosts: Sequence[str]) -> None:
    """Raise ConfigurationError if no certificate can be issued for this identity and its hosts."""
    role, name = identity.role, identity.name
    if f"{name}.pem" in (f"{AUTHORITY}.pem", REVOKED):
        raise ConfigurationError(
            f"the name {name!r} is reserved for the authority; choose another name"
        )
    if role in DIALLED and not hosts:
        raise ConfigurationError(
            f"the certificate of a {role} needs the addresses that hosts connect to; add --host, "
            "for example --host localhost --host 127.0.0.1"
        )
    if role not in DIALLED and hosts:
        raise ConfigurationError(
            f"no party connects to a {role}, so its certificate has no "
            f"addresses; remove --host {hosts[0]}"
        )
    if role in SPEAKING and not identity.claims:
        raise ConfigurationError(
            f"{role} {name!r} has no clients; add --clients, for example --clients client-0:5"
        )
    size = len(identity.uri())
    if size > MAXIMUM_URI_BYTES:
        raise ConfigurationError(
            f"the client names of {role} {name!r} need {size} bytes, but a certificate holds at "
            f"most {MAXIMUM_URI_BYTES}; number the clients, and give a range such as client-0:1999",
            bytes=size,
            maximum=MAXIMUM_URI_BYTES,
        )


def _general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if len(host) > 253 or re.fullmatch(rf"{_HOST_LABEL}(\.{_HOST_LABEL})*", host) is None:
        raise ConfigurationError(
            f"{host[:120]!r} is neither a host name nor an IP address; write the address without "
            "scheme, port and brackets",
            host=host[:120],
        )
    return x509.DNSName(host)


def _period(days: int, now: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= 36_500:
        raise ConfigurationError(
            f"the validity must be from 1 to 36500 days, not {days}", days=days
        )
    now = (now or datetime.now(UTC)).replace(microsecond=0)
    return now - BACKDATED, now + timedelta(days=days)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    period: tuple[datetime, datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(period[0])
        .not_valid_after(period[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _files(folder: Path, name: str) -> IssuedFiles:
    return IssuedFiles(
        certificate=folder / f"{name}.pem",
        key=folder / f"{name}.key",
        authority=folder / f"{AUTHORITY}.pem",
    )


def _refuse_existing(files: IssuedFiles, *, force: bool) -> None:
    for path in (files.certificate, files.key):
        if path.exists() and not force:
            raise ConfigurationError(
                f"the file {path} already exists; add --force to replace the file, or choose "
                "another name",
                path=path,
            )


def _write_pair(
    files: IssuedFiles, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    write_file(files.key, private_pem(key), KEY_MODE)
    write_file(files.certificate, certificate.public_bytes(Encoding.PEM), PUBLIC_MODE)
