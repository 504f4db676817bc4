"""Identities in certificates, and the clients that each identity may act for.

A certificate names its owner in one URI subject alternative name:

    potluck://FEDERATION/coordinator/NAME
    potluck://FEDERATION/operator/NAME
    potluck://FEDERATION/host/NAME?clients=hospital-a,client-0:23,silo-00:09
    potluck://FEDERATION/relay/NAME?clients=client-0:23

A claim is one client id, or `PREFIXfirst:last`, a range of numbered ids that includes both ends. If
`first` has leading zeros, every number of the range is padded to the same width. Every identity has
exactly one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.names import ClientId, is_name

SCHEME = "potluck"
MAXIMUM_URI_BYTES = 6_144
"""Maximum size of an identity in bytes.

grpcio's handshake fails for client certificates of about 8 KB and more: the server sends two
session tickets, each with the certificate, and its buffer has only 17 KB.
"""

MAXIMUM_CLIENTS = 1_000_000
"""Maximum number of clients that a host may list in its configuration."""

_RANGE = re.compile(r"(?P<prefix>.*?)(?P<first>[0-9]+):(?P<last>[0-9]+)")
_URI = re.compile(
    rf"{SCHEME}://(?P<federation>[^/?]+)/(?P<role>[^/?]+)/(?P<name>[^/?]+)"
    r"(?:\?clients=(?P<clients>.+))?"
)


class Role(StrEnum):
    """Role of a certificate's owner in the federation; decides which service it may call."""

    COORDINATOR = "coordinator"
    HOST = "host"
    RELAY = "relay"
    OPERATOR = "operator"


SPEAKING = frozenset({Role.HOST, Role.RELAY})
"""Roles that act for clients: a host for its own clients, a relay for the clients of its hosts."""

DIALLED = frozenset({Role.COORDINATOR, Role.RELAY})
"""Roles to which hosts connect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientClaim:
    """One client id (`prefix` alone), or the ids `prefix` + n for every n in `numbers`.

    width: minimum number of digits of n; shorter numbers get leading zeros.
    """

    prefix: str
    numbers: range | None = None
    width: int = 1

    def __str__(self) -> str:
        if self.numbers is None:
            return self.prefix
        return f"{self.prefix}{self._digits(self.numbers[0])}:{self._digits(self.numbers[-1])}"

    @property
    def count(self) -> int:
        """Number of client ids in the claim; `len` of a range fails for more than 2**63."""
        return 1 if self.numbers is None else self.numbers.stop - self.numbers.start

    def includes(self, client_id: str) -> bool:
        """Return whether `client_id` is one of the claimed ids."""
        if self.numbers is None:
            return client_id == self.prefix
        digits = client_id.removeprefix(self.prefix)
        if not client_id.startswith(self.prefix) or not re.fullmatch("[0-9]{1,63}", digits):
            return False
        return int(digits) in self.numbers and digits == self._digits(int(digits))

    def ids(self) -> Iterator[ClientId]:
        """Yield every claimed client id, in order of the numbers."""
        if self.numbers is None:
            yield ClientId(self.prefix)
        else:
            for number in self.numbers:
                yield ClientId(self.prefix + self._digits(number))

    def _digits(self, number: int) -> str:
        return f"{number:0{self.width}d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The owner of a certificate. Raises IdentityError if a name or a claim is not allowed."""

    federation: str
    role: Role
    name: str
    claims: tuple[ClientClaim, ...] = ()

    def __post_init__(self) -> None:
        for what, text in (("federation", self.federation), (self.role.value, self.name)):
            if not is_name(text):
                raise IdentityError(
                    f"{what} name {text[:80]!r} is not allowed: use lower-case letters, digits, "
                    "'.', '_' and '-', starting with a letter or digit, 63 characters at most"
                )
        if self.claims and self.role not in SPEAKING:
            raise IdentityError(
                f"the certificate of {self.role} {self.name!r} lists clients, which only hosts "
                "and relays may have; issue it without clients",
                role=self.role,
                name=self.name,
            )

    def uri(self) -> str:
        """The identity as written in a certificate."""
        uri = f"{SCHEME}://{self.federation}/{self.role}/{self.name}"
        return f"{uri}?clients={','.join(map(str, self.claims))}" if self.claims else uri

    def may_speak_for(self, client_id: str) -> bool:
        """Return whether the owner may send messages for `client_id`. Takes time linear in the
        number of claims."""
        return any(claim.includes(client_id) for claim in self.claims)


def parse_identity(uri: str) -> Identity:
    """Return the identity in a URI. Raises IdentityError if `uri` is not the exact spelling of an
    identity."""
    match = _URI.fullmatch(uri) if len(uri) <= MAXIMUM_URI_BYTES else None
    if match is None:
        raise IdentityError(
            f"{uri[:120]!r} is not a Potluck identity; expected {SCHEME}://FEDERATION/ROLE/NAME, "
            "and for a host also ?clients=…"
        )
    if match["role"] not in set(Role):
        raise IdentityError(
            f"role {match['role'][:80]!r} is unknown; roles are {', '.join(Role)}",
            role=match["role"],
        )
    try:
        claims = tuple(map(_claim, match["clients"].split(","))) if match["clients"] else ()
    except ValueError as error:
        raise IdentityError(str(error)) from error
    return Identity(
        federation=match["federation"], role=Role(match["role"]), name=match["name"], claims=claims
    )


def parse_claims(texts: Iterable[str]) -> tuple[ClientClaim, ...]:
    """Return the claims in these texts. A text may contain several claims, separated by commas.

    Raises ConfigurationError if a claim is malformed.
    """
    try:
        return tuple(_claim(part.strip()) for text in texts for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def exceeding(
    asked: Iterable[ClientClaim], granted: Iterable[ClientClaim]
) -> tuple[ClientClaim, ...]:
    """Return the requested claims that are not fully covered by the granted claims.

    Claims of more than `MAXIMUM_CLIENTS` ids are not expanded: only an identical claim covers them.
    """
    granted = tuple(granted)
    return tuple(
        claim
        for claim in asked
        if claim not in granted
        and (
            claim.count > MAXIMUM_CLIENTS
            or not all(any(one.includes(each) for one in granted) for each in claim.ids())
        )
    )


def expand_clients(texts: Iterable[str]) -> list[ClientId]:
    """Return the client ids of these claims, in the order written.

    Raises ConfigurationError for a malformed text, a duplicate id, or more than `MAXIMUM_CLIENTS`
    ids.
    """
    claims = parse_claims(texts)
    count = sum(claim.count for claim in claims)
    if count > MAXIMUM_CLIENTS:
        raise ConfigurationError(
            f"{count} clients are listed, but a host may have at most {MAXIMUM_CLIENTS}; shorten "
            "the ranges, or use more hosts",
            count=count,
            maximum=MAXIMUM_CLIENTS,
        )
    seen: dict[ClientId, None] = {}
    for claim in claims:
        for client_id in claim.ids():
            if client_id in seen:
                raise ConfigurationError(
                    f"client {client_id!r} is listed twice (again in '{claim}'); list each once",
                    client=client_id,
                )
            seen[client_id] = None
    return list(seen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """The identity in a peer's certificate. serial: serial number of the certificate, unique for
    the authority."""

    identity: Identity
    serial: int
    expires: datetime

    def __str__(self) -> str:
        return f"{self.identity.role} '{self.identity.name}'"


@lru_cache(maxsize=1024)  # runs in every call; the result for a certificate never changes
def credential_from_pem(pem: bytes) -> Credential:
    """Read a PEM certificate. Raises IdentityError unless it contains exactly one identity."""
    try:
        certificate = parse_certificates(pem)[0]
    except ValueError as error:
        raise IdentityError("the certificate is not a certificate in PEM form") from error
    return Credential(
        identity=identity_from_certificate(certificate),
        serial=certificate.serial_number,
        expires=certificate.not_valid_after_utc,
    )


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates in a PEM text, at least one, with all their parts parsed.

    Raises ValueError if one is malformed; x509 alone would detect that only when a part is used.
    """
    try:
        certificates = x509.load_pem_x509_certificates(pem)
        for certificate in certificates:
            certificate.public_key()
            _ = certificate.extensions, certificate.subject, certificate.issuer
    except (
        TypeError,
        UnsupportedAlgorithm,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise ValueError(str(error)) from error
    return certificates


def identity_from_certificate(certificate: x509.Certificate) -> Identity:
    """Return the identity in a certificate from `parse_certificates`. Raises IdentityError unless
    it has exactly one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}:")]
    if len(ours) != 1:
        raise IdentityError(
            f"the certificate contains {len(ours)} Potluck identities instead of one; "
            "issue it with `potluck pki issue`"
        )
    return parse_identity(ours[0])


def peer_credential(auth_context: Mapping[str, Iterable[bytes]]) -> Credential:
    """Return the credential of a call's peer, from grpc's `context.auth_context()`.

    TLS has verified the certificate before any handler runs. Raises IdentityError if the connection
    does not use TLS 1.3, or if it has no certificate with an identity.
    """
    versions = list(auth_context.get("ssl_tls_version", ()))
    if versions != [b"TLSv1.3"]:
        raise IdentityError("the connection does not use TLS 1.3; connect with TLS 1.3")
    certificates = list(auth_context.get("x509_pem_cert", ()))
    if len(certificates) != 1:
        raise IdentityError("the caller sent no certificate; connect with mutual TLS")
    return credential_from_pem(certificates[0])


def _claim(text: str) -> ClientClaim:
    """Return the claim in a text. Raises ValueError, with the reason, if it is malformed."""
    match = _RANGE.fullmatch(text)
    if match is None:
        if not is_name(text):
            raise ValueError(
                f"{text[:80]!r} is neither a client id nor a range such as client-0:23; a client "
                "id has at most 63 lower-case letters, digits, '.', '_' and '-'"
            )
        return ClientClaim(prefix=text)
    first, last = match["first"], match["last"]
    if not is_name(match["prefix"] + first) or not is_name(match["prefix"] + last):
        raise ValueError(f"range {text[:160]!r} does not begin and end with client ids")
    width = len(first) if first.startswith("0") else 1
    numbers = range(int(first), int(last) + 1)
    claim = ClientClaim(prefix=match["prefix"], numbers=numbers, width=width)
    if int(last) < int(first):
        raise ValueError(f"range {text!r} has a first number above its last; swap them")
    if str(claim) != text:
        raise ValueError(
            f"range {text!r} has numbers with different leading zeros; write '{claim}'"
        )
    return claim
