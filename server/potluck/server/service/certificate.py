"""The certificate of a server process, reloaded when its files change.

Renewing the certificate therefore closes no connection and interrupts no round.
"""

from __future__ import annotations

import threading
from datetime import datetime

import grpc
import structlog

from potluck.common.errors import PotluckError
from potluck.common.net.file_stamp import Stamp, stamp
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles, TlsMaterial

log = structlog.get_logger()


class ServerCertificate:
    """The certificate for new connections. An open connection uses the certificate with which it
    started.

    If the files can't be used (for example, while they are being replaced), this is logged once,
    and the previous certificate stays in use. The files are read again when they change.
    """

    def __init__(self, files: TlsFiles, role: Role = Role.COORDINATOR) -> None:
        """Load the certificate. Raises the errors of `TlsFiles.load`."""
        self._files = files
        self._role = role
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._material = files.load(role)

    @property
    def expires(self) -> datetime:
        """Time when the current certificate expires."""
        return self._material.expires

    @property
    def authority_expires(self) -> datetime:
        """Time when the certificate of the TLS authority expires."""
        return self._material.authority_expires

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that are reloaded from the files. Peers must have a certificate of
        this TLS authority."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._material),
            self._fetch,  # type: ignore[arg-type]  # the stubs lack None, which grpc documents
            require_client_authentication=True,
        )

    def refresh(self) -> bool:
        """Read the files again if they have changed. Return True if the certificate in use has
        changed."""
        with self._lock:
            seen = self._look()
            if seen == self._stamp:
                return False
            self._stamp = seen
            try:
                material = self._files.load(self._role)
            except PotluckError as error:
                log.warning("changed certificate can't be used yet", why=error.message)
                return False
            changed = material != self._material
            self._material = material
            if changed:
                log.info("certificate renewed", expires=material.expires.isoformat())
            return changed

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return changed credentials; None if they are unchanged. gRPC calls this in its own thread
        before every handshake."""
        return _configuration(self._material) if self.refresh() else None

    def _look(self) -> Stamp:
        return stamp(self._files.certificate, self._files.key, self._files.authority)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.authority
    )
