"""Errors of connections to the coordinator, each in one line with its cause and a remedy.

gRPC reports every failed connection as UNAVAILABLE; only its text distinguishes the causes. If gRPC
changes a text, the error contains gRPC's own text instead. So only two things depend on gRPC's
texts: the error's wording, and whether it is permanent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from dataclasses import dataclass

import grpc
from cryptography import x509

from potluck.common.errors import IdentityError, PotluckError, UnreachableError, from_rpc_error
from potluck.common.net.proxies import Proxy, proxy_of
from potluck.common.net.tls import TlsFiles
from potluck.common.plain_text import plain


@dataclass(frozen=True, slots=True)
class _Cause:
    mark: str  # the part of gRPC's text that identifies the cause
    error: type[IdentityError] | type[UnreachableError]
    message: str


_OTHER_AUTHORITY = "CERTIFICATE_VERIFY_FAILED"
_PROBE_SECONDS = 3.0
_ISSUER = 200
_ENDS_TLS = (
    "a TLS inspection or a load balancer on the path ends the TLS connection; exempt {address} "
    "from it, or let it pass TLS through"
)
_HTTP = "{address} answers as a web server does, not as a Potluck coordinator; check the address: "
_NO_ANSWER = " (UNAVAILABLE)"  # how `from_rpc_error`'s text ends if gRPC itself failed

# The first cause whose first text occurs in gRPC's error text is used.
_CAUSES = (
    _Cause(
        "certificate has expired",
        IdentityError,
        "the coordinator's certificate at {address} has expired; renew it with `potluck pki "
        "renew FOLDER coordinator`, and copy it to the coordinator's machine; no restart is "
        "needed",
    ),
    _Cause(
        "certificate is not yet valid",
        IdentityError,
        "the coordinator's certificate at {address} is not valid yet; set this machine's clock",
    ),
    _Cause(
        "unsupported certificate purpose",
        IdentityError,
        "the server at {address} sent a certificate that is not a coordinator's; set the address "
        "of the coordinator that {authority} belongs to",
    ),
    _Cause(
        "Hostname Verification Check failed",
        IdentityError,
        "the coordinator's certificate does not name {host}; issue it with --host {host}, or "
        "connect to a name in the certificate",
    ),
    _Cause(
        _OTHER_AUTHORITY,
        IdentityError,
        "the server at {address} sent a certificate that {authority} did not sign; copy "
        "authority.pem from the coordinator's federation",
    ),
    _Cause(
        "WRONG_VERSION_NUMBER",
        IdentityError,
        "{address} does not speak TLS, so it is not a Potluck coordinator; check the address",
    ),
    _Cause(
        "Connection refused",
        UnreachableError,
        "nothing listens at {address} (connection refused); is the coordinator running?",
    ),
    _Cause("missing selected ALPN property", IdentityError, _HTTP + _ENDS_TLS),
    _Cause("http1.x server", IdentityError, _HTTP + _ENDS_TLS),
    _Cause("http2 header with status", UnreachableError, _HTTP + _ENDS_TLS),
    _Cause(
        # The kernel accepts the connection, but the handshake gets no answer: the process hangs, or
        # waits for a request in another protocol.
        "Endpoint closing",
        UnreachableError,
        "{address} accepts connections, but does not answer; it may not be a Potluck coordinator: "
        "check the address. If it is one, its process hangs or its machine is overloaded: see the "
        "log of the process, and restart it",
    ),
    _Cause(
        # The server may refuse the certificate later: in TLS 1.3, the client's handshake ends
        # before the server's check.
        "last error: UNAVAILABLE",
        UnreachableError,
        "{address} closed the connection at once; if a coordinator runs there, it refused "
        "{certificate}; check that one authority signed this certificate and the coordinator's",
    ),
)


def connection_error(
    error: grpc.RpcError, address: str, files: TlsFiles, *, server_name: str | None = None
) -> PotluckError:
    """Return the exception that explains a failed call to the coordinator at `address`.

    A failure to connect becomes an IdentityError if the coordinator's certificate was refused
    (trying again helps only after a person has acted), else an UnreachableError. Any other error is
    converted by `from_rpc_error`. server_name: the name that the coordinator's certificate must
    contain, if not HOST. If the connection uses an HTTP proxy, the error names it.
    """
    found = from_rpc_error(error)
    if not isinstance(found, UnreachableError):
        return found
    proxy = proxy_of(address, os.environ)
    for cause in _CAUSES:
        if cause.mark in found.message and (proxy is None or cause.error is IdentityError):
            text = cause.message
            if cause.mark == _OTHER_AUTHORITY and proxy is None:
                text = _foreign(address, server_name) or text
            message = text.format(
                address=address,
                host=server_name or address.rpartition(":")[0].strip("[]"),
                authority=files.authority,
                certificate=files.certificate,
            )
            if proxy is not None:
                message += (
                    f". The connection uses {_name(proxy)}, which may send its own certificate"
                )
            return cause.error(message, address=address)
    if not found.message.endswith(_NO_ANSWER):
        return found
    # Only the remedy follows a semicolon: `potluck doctor` separates them there.
    detail = " ".join(found.message.removesuffix(_NO_ANSWER).split()).replace("; ", ", ")
    if proxy is not None:
        return _proxy_error(detail, proxy, address)
    return UnreachableError(
        f"can't reach the coordinator at {address}: {detail}; check the address, and that the "
        "coordinator runs there",
        address=address,
    )


def _foreign(address: str, server_name: str | None) -> str:
    """Return the message for a certificate that belongs to no federation. Return "" if it belongs
    to one, or if the server sent none."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only read the certificate
    shown: x509.Certificate | None = None
    with contextlib.suppress(OSError, ValueError):
        place = (host.strip("[]"), int(port))
        with (
            socket.create_connection(place, timeout=_PROBE_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=server_name or place[0]) as wrapped,
        ):
            shown = x509.load_der_x509_certificate(wrapped.getpeercert(binary_form=True) or b"")
    if shown is None or _of_a_federation(shown):
        return ""
    issuer = plain(shown.issuer.rfc4514_string(), _ISSUER).translate({123: "(", 125: ")"})
    return (
        "{address} shows a certificate that '" + issuer + "' issued, which is not a federation's "
        "authority: " + _ENDS_TLS
    )


def _of_a_federation(certificate: x509.Certificate) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return any(uri.startswith("potluck://") for uri in uris)


def _proxy_error(detail: str, proxy: Proxy, address: str) -> UnreachableError:
    refused = "Connection refused" in detail
    cause = "nothing listens there (connection refused)" if refused else detail
    host = address.rpartition(":")[0].strip("[]")
    return UnreachableError(
        f"can't reach {address} through {_name(proxy)}: {cause}; check the proxy, correct "
        f"{proxy.variable}, or add {host} to no_proxy",
        address=address,
        proxy=proxy.address,
        variable=proxy.variable,
    )


def _name(proxy: Proxy) -> str:
    return f"the HTTP proxy {proxy.address} (environment variable {proxy.variable})"
