"""Errors of failed connections name the cause and the remedy."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest

from potluck.common.errors import UnreachableError
from potluck.common.net.connection_errors import connection_error
from potluck.common.net.tls import TlsFiles

ADDRESS = "127.0.0.1:7443"
FILES = TlsFiles(certificate=Path("o.pem"), key=Path("o.key"), authority=Path("authority.pem"))
ATTEMPT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7443: "
CANT = f"can't reach the coordinator at {ADDRESS}: "
CHECK = "; check the address, and that the coordinator runs there"
PERHAPS_ANOTHER = (
    "it may not be a Potluck coordinator: check the address. If it is one, its process hangs or "
    "its machine is overloaded: see the log of the process, and restart it"
)


def unavailable(details: str) -> str:
    """Return the message about a call that gRPC ended as UNAVAILABLE."""
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details)
    found = connection_error(error, ADDRESS, FILES)
    assert isinstance(found, UnreachableError)
    return found.message


@pytest.mark.parametrize(
    ("details", "message"),
    [
        (
            ATTEMPT + "Failed to connect to remote host: Connection refused",
            f"nothing listens at {ADDRESS} (connection refused); is the coordinator running?",
        ),
        (
            ATTEMPT + "Endpoint closing",
            f"{ADDRESS} accepts connections, but does not answer; {PERHAPS_ANOTHER}",
        ),
        (
            ATTEMPT + "No route to host",
            f"{CANT}{ATTEMPT.replace('; ', ', ')}No route to host{CHECK}",
        ),
    ],
)
def test_failed_connection_has_one_remedy_after_the_only_semicolon(
    details: str, message: str
) -> None:
    assert unavailable(details) == message
