"""The register of an authority: lists, renews, revokes and signs certificates.

issued/SERIAL.pem   every certificate it issued
revoked.pem         the revocation list, for the coordinator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from potluck.common.errors import ConfigurationError
from potluck.common.net.identity import ClientClaim, Identity, Role, exceeding, parse_claims
from potluck.common.net.key_files import (
    KEY_MODE,
    PUBLIC_MODE,
    private_pem,
    read_request,
    write_file,
)
from potluck.common.net.revocation import RevocationList, read_revocations
from potluck.deploy.pki.authority import (
    AUTHORITY,
    LEAF_DAYS,
    REGISTER,
    REVOKED,
    certify,
    check_authority,
    check_request,
    load_authority,
)
from potluck.deploy.pki.certificates import (
    CertificateSummary,
    inspect,
    read_certificate,
    sign_revocations,
)

SOON = timedelta(days=30)
"""Remaining validity below which a certificate should be renewed."""
_FEWEST_DIGITS = 8
"""Minimum number of digits of a serial number by which a certificate is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Identity and key granted to a signing request. The request's file is read only once.

    identity: name, role and clients that the certificate will contain. public_key: the key that it
    will certify.
    """

    identity: Identity
    public_key: ec.EllipticCurvePublicKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A certificate that the authority has issued, from its register."""

    summary: CertificateSummary
    identity: Identity
    revoked: datetime | None

    def state(self, now: datetime) -> str:
        """ "revoked", "expired", "not yet valid", "expires soon" or "valid"."""
        if self.revoked is not None:
            return "revoked"
        if now > self.summary.not_after:
            return "expired"
        if now < self.summary.not_before:
            return "not yet valid"
        return "expires soon" if self.summary.not_after - now < SOON else "valid"


def issued(folder: Path) -> list[Issued]:
    """Return all certificates of an authority, oldest first.

    Certificates next to the register are included: they may be older than the register. Raises
    ConfigurationError or IdentityError for a folder without an authority, or a damaged file.
    """
    revoked = _revocations(folder).revoked
    found: dict[str, Issued] = {}
    in_use: set[str] = set()
    beside = [path for path in folder.glob("*.pem") if path.name != REVOKED]
    for path in [*sorted(folder.glob(f"{REGISTER}/*.pem")), *sorted(beside)]:
        summary = inspect(path)
        if path.parent == folder:
            in_use.add(summary.serial)
        if summary.identity is not None:
            since = revoked.get(int(summary.serial, 16))
            one = Issued(summary=summary, identity=summary.identity, revoked=since)
            found.setdefault(summary.serial, one)
    return sorted(found.values(), key=lambda one: (*_age(one), one.summary.serial in in_use))


def _age(one: Issued) -> tuple[datetime, int]:
    """Return a sort key for the time of issue.

    Certificates store whole seconds only. If two certificates are of the same second, the files'
    times decide. If these times are equal too, the certificate next to the register is newer, since
    it is in use.
    """
    return one.summary.not_before, one.summary.path.stat().st_mtime_ns


def find(folder: Path, name_or_serial: str) -> list[Issued]:
    """Return all certificates of a party, or the certificate with a serial number (hexadecimal).

    A serial number may be given by its first digits, at least 8. Raises ConfigurationError if there
    is none, or if several certificates have such a serial number.
    """
    everything = issued(folder)
    found = [one for one in everything if one.identity.name == name_or_serial]
    if not found and len(name_or_serial) >= _FEWEST_DIGITS:
        start = name_or_serial.lower()
        found = [one for one in everything if one.summary.serial.startswith(start)]
        if len(found) > 1:
            raise ConfigurationError(
                f"{len(found)} serial numbers begin with {name_or_serial!r}; give more digits"
            )
    if not found:
        names = sorted({one.identity.name for one in everything})
        raise ConfigurationError(
            f"{folder} has issued no certificate with the name or serial number "
            f"{name_or_serial!r}; issued names: {', '.join(names) or '(none)'}"
        )
    return found


def renew(
    folder: Path,
    name: str,
    *,
    days: int = LEAF_DAYS,
    new_key: bool = False,
    now: datetime | None = None,
) -> tuple[Path, Issued]:
    """Issue a party's newest certificate again. Return the new file and the replaced certificate.

    The new certificate has the same identity and addresses. Without `new_key` it also has the same
    key: then only NAME.pem changes, and the key may have been made on another machine. Raises
    ConfigurationError if the certificate was revoked.
    """
    authority = load_authority(folder)
    old = find(folder, name)[-1]
    if old.revoked is not None:
        raise ConfigurationError(
            f"the newest certificate of {old.identity.name} was revoked on "
            f"{old.revoked:%Y-%m-%d}; issue a new certificate with `potluck pki issue … --force` "
            f"to readmit {old.identity.name}"
        )
    target = folder / f"{old.identity.name}.pem"
    made = ec.generate_private_key(ec.SECP256R1()) if new_key else None
    key = _key_of(old.summary.path) if made is None else made.public_key()
    certificate = certify(authority, old.identity, key, hosts=old.summary.hosts, days=days, now=now)
    if made is not None:
        write_file(target.with_suffix(".key"), private_pem(made), KEY_MODE)
    write_file(target, certificate.public_bytes(Encoding.PEM), PUBLIC_MODE)
    return target, old


def grant(
    folder: Path, request: Path, role: Role = Role.HOST, clients: Sequence[str] = ()
) -> Grant:
    """Read a signing request, and grant its name with the given role and clients.

    Without `clients`, the grant has the clients of the party's newest certificate. Raises
    ConfigurationError or IdentityError if the request asks for more, for another role or
    federation, or is malformed.
    """
    found = read_request(request)
    asked = found.identity
    federation = load_authority(folder).federation
    if asked.federation != federation:
        raise ConfigurationError(
            f"the request {request} is for federation {asked.federation}, but the authority in "
            f"{folder} is of federation {federation}"
        )
    if asked.role is not role:
        raise ConfigurationError(
            f"the request {request} is for the role {asked.role}, not {role}; to sign a request "
            f"for this role, add --role {asked.role}"
        )
    claims = parse_claims(clients) if clients else _granted_before(folder, asked)
    more = ", ".join(map(str, exceeding(asked.claims, claims)))
    if more:
        granted = ", ".join(map(str, claims)) or "no client"
        raise ConfigurationError(
            f"the request {request} is for the clients {more[:400]}, but the certificate would "
            f"have {granted[:400]}; name all requested clients with --clients, or make a request "
            "for fewer clients"
        )
    identity = Identity(federation=federation, role=role, name=asked.name, claims=claims)
    return Grant(identity=identity, public_key=found.public_key)


def _granted_before(folder: Path, asked: Identity) -> tuple[ClientClaim, ...]:
    """Return the claims of a party's newest certificate; none if it was revoked."""
    for newest in [one for one in issued(folder) if one.identity.name == asked.name][-1:]:
        if newest.identity.role is asked.role and newest.revoked is None:
            return newest.identity.claims
    return ()


def sign(
    folder: Path,
    granted: Grant,
    *,
    hosts: Sequence[str] = (),
    days: int = LEAF_DAYS,
    force: bool = False,
    now: datetime | None = None,
) -> Path:
    """Write the certificate of a grant, NAME.pem beside the authority, and return its path.

    The request's file is not read again, so replacing it after `grant` has no effect. Raises
    ConfigurationError if NAME.pem exists and `force` is not set.
    """
    authority = load_authority(folder)
    identity = granted.identity
    check_request(identity, hosts)
    target = folder / f"{identity.name}.pem"
    if target.exists() and not force:
        raise ConfigurationError(
            f"the file {target} already exists; add --force to replace the file", path=target
        )
    certificate = certify(authority, identity, granted.public_key, hosts=hosts, days=days, now=now)
    write_file(target, certificate.public_bytes(Encoding.PEM), PUBLIC_MODE)
    return target


def revoke(
    folder: Path, name_or_serial: str, *, superseded: bool = False, now: datetime | None = None
) -> list[Issued]:
    """Revoke a party's certificates, or one with a serial number; return those newly revoked.

    superseded: keep the newest certificate valid. Writes FOLDER/revoked.pem. Raises
    ConfigurationError.
    """
    authority = load_authority(folder)
    chosen = find(folder, name_or_serial)
    if superseded:
        chosen = chosen[:-1]
    new = [one for one in chosen if one.revoked is None]
    before = _revocations(folder)
    since = (now or datetime.now(UTC)).replace(microsecond=0)
    revoked = before.revoked | {int(one.summary.serial, 16): since for one in new}
    if new or not (folder / REVOKED).exists():
        made = sign_revocations(
            authority.certificate, authority.key, revoked, number=before.number + 1, now=since
        )
        write_file(folder / REVOKED, made, PUBLIC_MODE)
    return new


def _revocations(folder: Path) -> RevocationList:
    path = folder / REVOKED
    authority = folder / f"{AUTHORITY}.pem"
    check_authority(folder)
    return read_revocations(path, authority) if path.exists() else RevocationList()


def expires_in(folder: Path, now: datetime) -> dict[str, timedelta]:
    """Return the remaining validity of each party's newest certificate; negative if it expired.

    Keys are the parties' names. Revoked certificates are excluded. Raises the errors of `issued`.
    """
    newest = {one.identity.name: one for one in issued(folder) if one.revoked is None}
    return {name: one.summary.not_after - now for name, one in sorted(newest.items())}


def _key_of(path: Path) -> ec.EllipticCurvePublicKey:
    key = read_certificate(path).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigurationError(
            f"{path} is not a P-256 certificate, the only kind that grpcio accepts"
        )
    return key
