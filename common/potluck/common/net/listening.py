"""Addresses on which servers listen: their form, and binding.

If a server can't listen on an address, finds out the cause, because gRPC does not report it.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from potluck.common.errors import UnreachableError

if TYPE_CHECKING:
    import grpc.aio

_LAST_PORT = 65_535
_UNPRIVILEGED = 1024


def _an_address(listen: str) -> str:
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        raise ValueError(f"must be HOST:PORT, with a port from 0 to {_LAST_PORT}")
    return listen


ListenAddress = Annotated[str, AfterValidator(_an_address)]
"""HOST:PORT on which a server listens. Port 0: any free port."""


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials) -> str:
    """Have a server listen on HOST:PORT. Return the address, with the port if it was 0.

    Raises UnreachableError, which names the cause.
    """
    try:
        port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise not_listening(address) from error
    return f"{address.rpartition(':')[0]}:{port}"


def check_not_in_use(address: str) -> None:
    """Raise UnreachableError if another process listens on HOST:PORT.

    Called before slow steps of a start. Other causes are left to the server, which may listen even
    if one of a name's addresses can't be bound.
    """
    host, _, port = address.rpartition(":")
    try:
        _bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise not_listening(address) from error


def not_listening(address: str) -> UnreachableError:
    """Return an error that names the cause why a server can't listen on HOST:PORT."""
    host, _, port = address.rpartition(":")
    return UnreachableError(f"can't listen on {address}: {_cause(host, port)}", address=address)


def _cause(host: str, port: str) -> str:
    try:
        _bind(host, port)
    except OSError as error:
        return explained(error, int(port))
    return "the port was in use, and is free again now; start the process again"


def _bind(host: str, port: str) -> None:
    """Bind a socket to each address of a host, and release it. Raises OSError."""
    for family, kind, protocol, _, where in socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)


def explained(error: OSError, port: int) -> str:
    """Return the cause and the remedy of an error that occurred when binding to a port."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            "this machine does not have this address; set `listen` or --listen to an address of "
            "the machine, or to 0.0.0.0"
        )
    if error.errno in (errno.EACCES, errno.EPERM) and port < _UNPRIVILEGED:
        return (
            f"this user may not use ports below {_UNPRIVILEGED}; choose another with `listen` or "
            "--listen, or set AmbientCapabilities=CAP_NET_BIND_SERVICE and the same "
            "CapabilityBoundingSet= in the systemd unit"
        )
    if error.errno == errno.EADDRINUSE:
        return (
            "the port is in use; stop the process that listens there, or choose another with "
            "`listen` or --listen"
        )
    return f"{error.strerror or error}; choose another with `listen` or --listen"
