"""Makes and signs the authority's revocation list; `potluck.common.net.revocation` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

_FOR_EVER = timedelta(days=36_500)
"""Validity of a list: it is in force until a newer one replaces it."""


def sign_revocations(
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    revoked: Mapping[int, datetime],
    *,
    number: int,
    now: datetime,
) -> bytes:
    """Return a signed list in PEM form. revoked: serial numbers with their times of revocation."""
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
