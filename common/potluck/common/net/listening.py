"""Finds out why a server can't listen on an address, because gRPC does not report the cause."""

from __future__ import annotations

import errno
import socket

from potluck.common.errors import UnreachableError

_UNPRIVILEGED = 1024


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
