"""Which addresses are of this machine, and asked without a proxy."""

from __future__ import annotations

import pytest

from potluck.common.net.proxies import direct_at_home


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost", "LocalHost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert direct_at_home(f"{host}:7443") == (("grpc.enable_http_proxy", 0),)


@pytest.mark.parametrize("host", ["10.0.0.1", "[2001:db8::1]", "localhost.example", "coordinator"])
def test_addresses_of_others(host: str) -> None:
    assert direct_at_home(f"{host}:7443") == ()
