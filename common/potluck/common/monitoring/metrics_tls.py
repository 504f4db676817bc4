"""Metrics over mutual TLS: the server's certificate, and the scrapers that are allowed.

Hosts' own certificates are not valid for servers. If the federation's authority issued one that is,
its owner could pose as the coordinator. So metrics have a separate authority, created by `potluck
pki init` in another folder. This authority issues a certificate with the role coordinator for each
metrics address, and one with the role operator for each scraper.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import Field

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.identity import Role, identity_from_certificate, parse_certificates
from potluck.common.net.tls import TlsFiles


class MetricsTls(TlsFiles):
    """Certificate files of the metrics server, and the names of the operators that may scrape."""

    scrapers: tuple[str, ...] = Field(
        min_length=1,
        description="names of the operators, in certificates of that authority, who may scrape",
    )

    def check(self, own: TlsFiles) -> None:
        """Raise ConfigurationError if the authority is also that of the process's own certificate,
        or if a file can't be used.

        Raise IdentityError if the certificate is not valid for a server.
        """
        if _read(self.authority) == _read(own.authority):
            raise ConfigurationError(
                f"metrics_tls.authority {self.authority} is also the federation's: the owner of a "
                "server certificate from it could pose as the coordinator; create another "
                "authority with `potluck pki init`",
                path=self.authority,
            )
        self.load(Role.COORDINATOR)

    def context(self) -> ssl.SSLContext:
        """Return the server's context: TLS 1.3, and every client must have a certificate of the
        authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def admits(self, certificate: bytes | None) -> bool:
        """Return True if the owner of this certificate may scrape. certificate: in DER form; None
        without one."""
        if certificate is None:
            return False
        try:
            pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
            identity = identity_from_certificate(parse_certificates(pem)[0])
        except (IdentityError, ValueError):
            return False
        return identity.role is Role.OPERATOR and identity.name in self.scrapers


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}", path=path) from error
