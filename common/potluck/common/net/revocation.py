"""The authority's revocation list (RFC 5280), as a PEM file.

The TLS authority signs the list, so it can't be forged in transit. An old list does no harm: a
coordinator remembers the revocations of all lists that it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.identity import parse_certificates

MAXIMUM_LIST_BYTES = 3 << 20
"""Maximum size of a list, below the limit of a message. Enough for tens of thousands of
revocations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RevocationList:
    """Revoked serial numbers, each with the time of its revocation.

    number: version of the list, which the authority increments.
    """

    number: int = 0
    revoked: dict[int, datetime] = field(default_factory=dict)


def parse_revocations(pem: bytes, authority_pem: bytes, *, source: str) -> RevocationList:
    """Return a revocation list, after checking that the authority signed it.

    source: name of the list in errors. Raises ConfigurationError if the list is malformed or too
    large, IdentityError if another authority signed it.
    """
    if len(pem) > MAXIMUM_LIST_BYTES:
        raise ConfigurationError(
            f"{source} has {len(pem)} bytes; a revocation list may have at most "
            f"{MAXIMUM_LIST_BYTES}"
        )
    try:
        found = x509.load_pem_x509_crl(pem)
        signed = any(_signed_by(found, each) for each in parse_certificates(authority_pem))
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        revoked = {entry.serial_number: entry.revocation_date_utc for entry in found}
    except (
        TypeError,
        ValueError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.InvalidVersion,
    ) as error:
        raise ConfigurationError(
            f"{source} is not a revocation list in PEM form; use the file that `potluck pki "
            "revoke` writes"
        ) from error
    if not signed:
        raise IdentityError(
            f"{source} is not signed by this federation's authority; use revoked.pem from the "
            "folder of this authority"
        )
    return RevocationList(number=number, revoked=revoked)


def read_revocations(path: Path, authority: Path) -> RevocationList:
    """Return the list in the file `path`, after checking it with the certificate in the file
    `authority`.

    Raises ConfigurationError, IdentityError.
    """
    return parse_revocations(
        _read(path, "revocation list"), _read(authority, "authority"), source=str(path)
    )


class Revocations:
    """All revocations in the lists seen up to now; the set only grows.

    Its methods don't block and may be called from any thread.
    """

    def __init__(self) -> None:
        self._revoked: dict[int, datetime] = {}

    def __len__(self) -> int:
        return len(self._revoked)

    def add(self, revocations: RevocationList) -> frozenset[int]:
        """Add the revocations of a list. Return the serial numbers that are new."""
        new = frozenset(revocations.revoked.keys() - self._revoked.keys())
        self._revoked = {**revocations.revoked, **self._revoked}
        return new

    def check(self, serial: int, who: str) -> None:
        """Raise IdentityError if the certificate with this serial number was revoked. who: its
        owner, for the error."""
        since = self._revoked.get(serial)
        if since is not None:
            raise IdentityError(
                f"the certificate of {who} (serial {serial:x}) was revoked on "
                f"{since:%Y-%m-%d %H:%M} UTC; ask the operator for a new one",
                serial=f"{serial:x}",
            )


def _signed_by(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAXIMUM_LIST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{what} {path} can't be read ({error.strerror})") from error
