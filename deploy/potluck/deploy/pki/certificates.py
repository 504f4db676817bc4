"""Reads and checks certificate files, and signs the authority's revocation list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.names import is_name
from potluck.common.net.identity import Identity, identity_from_certificate, parse_certificates

# Certificates -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateSummary:
    """Content of a certificate file. `identity` is None for an authority."""

    path: Path
    federation: str
    identity: Identity | None
    hosts: tuple[str, ...]
    serial: str
    sha256: str
    not_before: datetime
    not_after: datetime


def inspect(path: Path) -> CertificateSummary:
    """Read the certificate at `path`. Raises ConfigurationError; IdentityError if not Potluck's."""
    certificate = read_certificate(path)
    authority = is_authority(certificate)
    identity = None if authority else identity_from_certificate(certificate)
    hosts: tuple[str, ...] = ()
    if identity is not None:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = names.get_values_for_type(x509.IPAddress)
        hosts = (*names.get_values_for_type(x509.DNSName), *map(str, addresses))
    return CertificateSummary(
        path=path,
        federation=federation_of(path, certificate) if identity is None else identity.federation,
        identity=identity,
        hosts=hosts,
        serial=f"{certificate.serial_number:x}",
        sha256=certificate.fingerprint(hashes.SHA256()).hex(),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate in a file. Raises ConfigurationError."""
    try:
        return parse_certificates(path.read_bytes())[0]
    except OSError as error:
        raise ConfigurationError(
            f"can't read the certificate {path} ({error.strerror})", path=path
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a certificate in PEM form", path=path) from error


def is_authority(certificate: x509.Certificate) -> bool:
    """Return True if a certificate may issue other certificates."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def federation_of(path: Path, certificate: x509.Certificate) -> str:
    """Return the federation of an authority. Raises IdentityError if the certificate has none."""
    found = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    name = str(found[0].value) if len(found) == 1 else ""
    if not is_name(name):
        raise IdentityError(
            f"{path} is not the authority certificate of a Potluck federation", path=path
        )
    return name


# The revocation list ------------------------------------------------------------------------------

_FOR_EVER = timedelta(days=36_500)
"""Validity of a revocation list: in effect unlimited, until a newer list replaces it."""


def sign_revocations(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    revoked: Mapping[int, datetime],
    *,
    number: int,
    now: datetime,
) -> bytes:
    """Return a signed revocation list as PEM. revoked: serial numbers with times of revocation."""
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(now)
        .next_update(now + _FOR_EVER)
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(identifier, critical=False)
    )
    for serial, since in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
