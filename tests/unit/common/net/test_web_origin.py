from __future__ import annotations

import pytest
import urllib3

from potluck.common.net.web_origin import web_origin


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://store.example.org", "https://store.example.org"),
        ("https://Store.Example.org:443/bucket/Key", "https://store.example.org"),
        ("http://store:80", "http://store"),
        ("http://store:443/x", "http://store:443"),
        ("https://store:80", "https://store:80"),
        ("https://store:/x", "https://store"),
        ("http://[FE80::1]:80/x", "http://[fe80::1]"),
        ("http://[::443]/x", "http://[::443]"),
        ("http://[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_origin_is_spelled_as_an_http_client_sends_it(url: str, origin: str) -> None:
    assert web_origin(url) == origin
    sent = urllib3.util.parse_url(url)
    default = {"http": 80, "https": 443}[str(sent.scheme)]
    port = "" if sent.port in (None, default) else f":{sent.port}"
    assert f"{sent.scheme}://{sent.host}{port}" == origin


def test_port_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="could not be cast"):
        web_origin("https://store:port")
