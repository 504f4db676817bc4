"""Mutual TLS: certificate files, the checks before they are used, and gRPC credentials.

Both sides always present a certificate of the federation's TLS authority. Only the coordinator's
certificate is valid for a server. Only the certificates of hosts and operators are valid for a
client (extended key usage). The TLS stack checks this on both sides. So a host can't pose as the
coordinator, even with the coordinator's name in its certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import BaseModel, ConfigDict, Field

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.identity import (
    Identity,
    Role,
    identity_from_certificate,
    parse_certificates,
)
from potluck.common.net.protocol import MAXIMUM_MESSAGE_BYTES
from potluck.common.net.proxies import direct_at_home

Options = tuple[tuple[str, int | str], ...]

_BOTH_SIDES: Options = (
    ("grpc.max_receive_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAXIMUM_MESSAGE_BYTES),
    # With these pings, a silent peer (cable, partition, frozen machine) is detected within 13 s.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # grpcio 1.85 in fact uses this timeout for an unanswered ping; the default is a minute. The
    # answer to a ping waits behind data in transit: files are sent in pieces that take 3 s
    # (`link.py`).
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A fixed window is as fast as gRPC's adaptive one and needs at most a third of its memory.
    ("grpc.http2.bdp_probe", 0),
)

SERVER_OPTIONS: Options = (
    *_BOTH_SIDES,
    # Accept the pings above, which are more frequent than gRPC's default allows.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Refuse compressed messages: 4 MiB could expand to gigabytes. The value 1 allows only
    # `identity`, which does not compress.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Without this option, a second coordinator would share the port with the first instead of
    # failing.
    ("grpc.so_reuseport", 0),
    # Bytes that a host may send before the server reads them. 1 MiB in flight suffices to fill a
    # line of 100 Mbit/s with a round-trip time of 80 ms.
    ("grpc.http2.lookahead_bytes", 1 << 20),
)

CHANNEL_OPTIONS: Options = (
    *_BOTH_SIDES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name, this is the time limit of one attempt to connect (20 s by default).
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A larger window than for uploads costs little memory: a host downloads one model at a time.
    ("grpc.http2.lookahead_bytes", 4 << 20),
)

DATA_OPTIONS: Options = (
    # On a connection that carries files, the answer to a ping waits behind data. gRPC doesn't take
    # the data as a sign of life. A dead coordinator is found by the control stream's connection.
    ("grpc.http2.ping_timeout_ms", 30_000),
)

_LAST_PORT = 65_535
_ISSUE_REMEDY = "make one with `potluck pki issue`"


class TlsFiles(BaseModel):
    """The three files that each party of a federation needs to connect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    certificate: Path = Field(
        description="Certificate of this party, created by `potluck pki issue`."
    )
    key: Path = Field(
        description="Private key of the certificate. Only its owner should be able to read the\n"
        "file."
    )
    authority: Path = Field(
        description="File authority.pem of the TLS authority whose certificates are accepted."
    )

    def load(
        self, expected_role: Role | None = None, *, now: datetime | None = None
    ) -> TlsMaterial:
        """Read and check the files. now: time of the check, by default the current time.

        Raises ConfigurationError, naming the file, if a file is missing or unreadable, or if the
        certificate is not valid now, does not belong to the key or comes from another authority.
        Raises IdentityError if the certificate has no identity, or does not have the role
        `expected_role`.
        """
        now = now or datetime.now(UTC)
        authority_pem = _read(
            self.authority, "authority", "copy authority.pem of the federation here"
        )
        certificate_pem = _read(self.certificate, "certificate", _ISSUE_REMEDY)
        key_pem = _read(self.key, "key", _ISSUE_REMEDY)
        authorities = _certificates(self.authority, authority_pem)
        certificate = _certificates(self.certificate, certificate_pem)[0]
        _check_period(
            self.certificate,
            certificate,
            now,
            remedy="renew it with `potluck pki renew FOLDER NAME`, and copy it here",
        )
        issuer = _issuer(certificate, authorities)
        if issuer is None:
            raise ConfigurationError(
                f"the authority {self.authority} did not sign the certificate "
                f"{self.certificate}; issue the certificate from the folder of this authority "
                "with `potluck pki issue`",
                certificate=self.certificate,
                authority=self.authority,
            )
        _check_period(self.authority, issuer, now, remedy="make a new one with `potluck pki init`")
        _check_key(self, certificate, key_pem)
        identity = identity_from_certificate(certificate)
        if expected_role is not None and identity.role is not expected_role:
            raise IdentityError(
                f"{self.certificate} is for the role {identity.role}, but {expected_role} is "
                f"needed here; make one with `potluck pki issue FOLDER {expected_role}`",
                certificate=self.certificate,
                role=identity.role,
                expected=expected_role,
            )
        return TlsMaterial(
            identity=identity,
            certificate=certificate_pem,
            key=key_pem,
            authority=authority_pem,
            expires=certificate.not_valid_after_utc,
            authority_expires=issuer.not_valid_after_utc,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsMaterial:
    """Checked PEM bytes of one party, and its identity.

    authority_expires: end of validity of the authority's certificate.
    """

    identity: Identity
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    expires: datetime
    authority_expires: datetime


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return a host's or operator's credentials, for `grpc.secure_channel` or
    `grpc.aio.secure_channel`.

    Raises the errors of `TlsFiles.load`, and IdentityError for a coordinator's certificate.
    """
    material = files.load()
    if material.identity.role is Role.COORDINATOR:
        raise IdentityError(
            f"{files.certificate} is for the role coordinator, which can't be used to connect to "
            "a coordinator; use a certificate made by `potluck pki issue FOLDER host` or `… "
            "operator`",
            certificate=files.certificate,
        )
    return grpc.ssl_channel_credentials(
        root_certificates=material.authority,
        private_key=material.key,
        certificate_chain=material.certificate,
    )


def channel(
    address: str, files: TlsFiles, *, server_name: str | None = None, options: Options = ()
) -> grpc.aio.Channel:
    """Return a channel to the coordinator at `address`, HOST:PORT. It connects when it is first
    used.

    The coordinator's certificate must contain HOST, or `server_name` if that is given (for a tunnel
    or a load balancer). options: gRPC options that add to the usual ones or replace them. Raises
    ConfigurationError for an address without a valid port, and the errors of `channel_credentials`.
    """
    found = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
    if found is None or not 1 <= int(found[1]) <= _LAST_PORT:  # gRPC would dial modulo 65,536
        raise ConfigurationError(
            f"address {address[:120]!r} is not HOST:PORT with a port from 1 to {_LAST_PORT}; write "
            "an address such as coordinator:7443",
            address=address[:120],
        )
    options = (*CHANNEL_OPTIONS, *direct_at_home(address), *options)
    if server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, channel_credentials(files), options=options)


def _read(path: Path, what: str, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise ConfigurationError(
            f"TLS {what} {path} can't be read ({cause}); {remedy}", path=path, cause=cause
        ) from error


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return parse_certificates(pem)
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is not a certificate in PEM form; {_ISSUE_REMEDY}", path=path
        ) from error


def _check_period(path: Path, certificate: x509.Certificate, now: datetime, *, remedy: str) -> None:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigurationError(
            f"{path} expired on {end:%Y-%m-%d %H:%M} UTC; {remedy}", path=path, expired=end
        )
    if now < begin:
        raise ConfigurationError(
            f"{path} is not valid before {begin:%Y-%m-%d %H:%M} UTC; set this machine's clock",
            path=path,
            valid_from=begin,
        )


def _issuer(
    certificate: x509.Certificate, authorities: list[x509.Certificate]
) -> x509.Certificate | None:
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
            continue
        return authority
    return None


def _check_key(files: TlsFiles, certificate: x509.Certificate, key_pem: bytes) -> None:
    try:
        key = load_pem_private_key(key_pem, password=None)
    except (UnsupportedAlgorithm, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{files.key} is not an unencrypted private key in PEM form; {_ISSUE_REMEDY}",
            key=files.key,
        ) from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigurationError(
            f"{files.key} is not the key of {files.certificate}; copy both files from the folder "
            "to which `potluck pki issue` wrote them",
            key=files.key,
            certificate=files.certificate,
        )
