"""Addresses of this machine, which are contacted without a proxy."""

from __future__ import annotations

import pytest

from potluck.common.net.proxies import Proxy, direct_at_home, proxy_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost", "LocalHost"])
def test_addresses_of_this_machine_are_contacted_without_a_proxy(host: str) -> None:
    assert direct_at_home(f"{host}:7443") == (("grpc.enable_http_proxy", 0),)


@pytest.mark.parametrize("host", ["10.0.0.1", "[2001:db8::1]", "localhost.example", "coordinator"])
def test_addresses_of_other_machines_may_be_contacted_through_a_proxy(host: str) -> None:
    assert direct_at_home(f"{host}:7443") == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"http_proxy": "http://p:3128"}, Proxy("p:3128", "http_proxy")),
        ({"http_proxy": "http://p:1", "https_proxy": "http://q:2"}, Proxy("q:2", "https_proxy")),
        ({"grpc_proxy": "http://me:secret@p:1"}, Proxy("p:1", "grpc_proxy")),
        ({"http_proxy": "http://p:1", "no_proxy": "example.org, site.test"}, None),
        ({"http_proxy": "http://p:1", "no_proxy": "other.org"}, Proxy("p:1", "http_proxy")),
    ],
)
def test_proxy_of_an_address_follows_the_environment(
    environment: dict[str, str], expected: Proxy | None
) -> None:
    assert proxy_of("coordinator.site.test:7443", environment) == expected


def test_no_proxy_networks_and_this_machine_are_contacted_directly() -> None:
    environment = {"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}
    assert proxy_of("10.1.2.3:7443", environment) is None
    assert proxy_of("localhost:7443", environment) is None
    assert proxy_of("11.1.2.3:7443", environment) == Proxy("p:1", "https_proxy")
