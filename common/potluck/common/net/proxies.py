"""Connections within this machine: no HTTP proxy takes part in them."""

from __future__ import annotations

import ipaddress
from typing import Final

_DIRECT: Final = (("grpc.enable_http_proxy", 0),)


def direct_at_home(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a gRPC channel to HOST:PORT that go past a proxy where HOST is this machine.

    gRPC minds `http_proxy` and `https_proxy` for every address that `no_proxy` does not name, the
    loopback interface's too; of a proxy's own loopback interface it would get the wrong port.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        at_home = ipaddress.ip_address(host).is_loopback
    except ValueError:
        at_home = host.lower() == "localhost"
    return _DIRECT if at_home else ()
