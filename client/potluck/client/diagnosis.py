"""Why a connection fails: gRPC only says that it does.

A TLS handshake that can never succeed looks to gRPC like a coordinator that is not there. One
handshake with Python's own TLS tells them apart.
"""

from __future__ import annotations

import socket
import ssl

from potluck.common.errors import ConfigurationError, IdentityError, PotluckError
from potluck.common.tls import TlsFiles

_TIMEOUT_SECONDS = 3.0


def diagnose(address: str, files: TlsFiles) -> PotluckError | None:
    """What is wrong with the certificates, if they are what keeps us from connecting; blocks.

    None where nothing listens, where it is silent, and where TLS works.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=str(files.authority))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            # With TLS 1.3 a refusal of our certificate arrives after the handshake.
            secure.recv(1)
    except ssl.SSLCertVerificationError as error:
        return _distrusted(address, files, error)
    except ssl.SSLError as error:
        return _refused(address, files, error)
    except OSError:
        return None
    return None


def _distrusted(address: str, files: TlsFiles, error: ssl.SSLCertVerificationError) -> PotluckError:
    cause = error.verify_message or "it can't be verified"
    if error.verify_code in (18, 19, 20, 21):  # X509_V_ERR_…: self-signed, or no known issuer
        return IdentityError(
            f"the coordinator at {address} has a certificate of another CA than "
            f"{files.authority}; copy authority.pem of its federation here",
            address=address,
            authority=files.authority,
        )
    return ConfigurationError(
        f"the certificate of the coordinator at {address} is not good: {cause.rstrip('.')}; issue "
        "one that names this address with `potluck pki issue`, or correct `coordinator`",
        address=address,
    )


def _refused(address: str, files: TlsFiles, error: ssl.SSLError) -> PotluckError | None:
    reason = (error.reason or "").lower()
    if "alert" not in reason:
        return None  # it broke off, or does not speak TLS: it may be another program's port
    return IdentityError(
        f"the coordinator at {address} refuses the certificate {files.certificate} "
        f"({reason.replace('_', ' ')}); get one of its federation, made by `potluck pki issue`",
        address=address,
        certificate=files.certificate,
    )
