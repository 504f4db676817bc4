"""Errors of connections to the coordinator, each in one line with its cause and a remedy.

gRPC reports every failed connection as UNAVAILABLE; only its text tells the causes apart. A text it
changes one day falls back to gRPC's own, so nothing but the wording depends on it, save whether
trying again can help.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from potluck.common.errors import IdentityError, PotluckError, UnreachableError, from_rpc_error
from potluck.common.net.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class _Cause:
    mark: str  # in gRPC's text
    error: type[IdentityError] | type[UnreachableError]
    message: str


# The first whose mark is found counts.
_CAUSES = (
    _Cause(
        "certificate has expired",
        IdentityError,
        "the coordinator's certificate at {address} has expired; renew it with "
        "`potluck pki renew FOLDER coordinator` and put it there; no restart is needed",
    ),
    _Cause(
        "certificate is not yet valid",
        IdentityError,
        "the coordinator's certificate at {address} is not valid yet; set this machine's clock",
    ),
    _Cause(
        "unsupported certificate purpose",
        IdentityError,
        "{address} does not show a coordinator's certificate; dial the coordinator of {authority}",
    ),
    _Cause(
        "Hostname Verification Check failed",
        IdentityError,
        "the coordinator's certificate does not name {host}; issue it with --host {host}, or dial "
        "a name that it holds",
    ),
    _Cause(
        "CERTIFICATE_VERIFY_FAILED",
        IdentityError,
        "{address} shows a certificate of another CA than {authority}; copy authority.pem from "
        "the coordinator's federation",
    ),
    _Cause(
        "WRONG_VERSION_NUMBER",
        IdentityError,
        "{address} does not speak TLS, so it is no Potluck coordinator; check the address",
    ),
    _Cause(
        "Connection refused",
        UnreachableError,
        "nothing listens at {address} (connection refused); is the coordinator running?",
    ),
    _Cause(
        # TLS 1.3 tells the dialling side that it is trusted before the other side has checked.
        "last error: UNAVAILABLE",
        UnreachableError,
        "{address} closed the connection at once; if a coordinator runs there, it refused "
        "{certificate}: is it of the same authority as the coordinator's?",
    ),
)


def connection_error(
    error: grpc.RpcError, address: str, files: TlsFiles, *, server_name: str | None = None
) -> PotluckError:
    """The exception behind a failed call to the coordinator at `address`.

    One that has to do with connecting is an IdentityError when the coordinator's certificate was
    refused (trying again helps only after somebody has acted), else an UnreachableError. Any other
    is what `from_rpc_error` makes of it. server_name: what its certificate must hold, if not HOST.
    """
    found = from_rpc_error(error)
    if not isinstance(found, UnreachableError):
        return found
    for cause in _CAUSES:
        if cause.mark in found.message:
            message = cause.message.format(
                address=address,
                host=server_name or address.rpartition(":")[0].strip("[]"),
                authority=files.authority,
                certificate=files.certificate,
            )
            return cause.error(message, address=address)
    return found
