"""Finds the HTTP proxy that a connection uses, and bypasses proxies for addresses of this
machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_DIRECT: Final = (("grpc.enable_http_proxy", 0),)
_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS: Final = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. variable: name of the environment variable that sets it."""

    address: str
    variable: str


def proxy_of(address: str, environment: Mapping[str, str]) -> Proxy | None:
    """Return the proxy through which gRPC connects to HOST:PORT, by gRPC's rules; None if it
    connects directly."""
    host = address.rpartition(":")[0].strip("[]")
    variable = next((name for name in _VARIABLES if environment.get(name)), None)
    if variable is None or direct_at_home(address):
        return None
    exceptions = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
    if any(_names(each.strip(), host) for each in exceptions.split(",")):
        return None
    parts = urlsplit(environment[variable])
    return Proxy(address=parts.netloc.rpartition("@")[2] or "?", variable=variable)


def _names(exception: str, host: str) -> bool:
    """Return whether an entry of `no_proxy` matches a host: by the end of the host's name, or by a
    network."""
    if not exception:
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(exception, strict=False)
    except ValueError:
        return host.lower().endswith(exception.lower())


def direct_at_home(address: str) -> tuple[tuple[str, int], ...]:
    """Return options of a gRPC channel to HOST:PORT that bypass proxies if HOST is this machine.

    gRPC uses `http_proxy` and `https_proxy` for every address that `no_proxy` does not match, even
    for the loopback interface. The call would then reach a port of the proxy's own loopback
    interface.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        at_home = ipaddress.ip_address(host).is_loopback
    except ValueError:
        at_home = host.lower() == "localhost"
    return _DIRECT if at_home else ()
