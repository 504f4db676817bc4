"""Access to the web UI's server."""

import os
import sys

import pytest

from potluck.page.page_access import HEADERS, PageAccess, is_loopback, is_own, other_user


def test_access_token_is_valid_once() -> None:
    redeemed = list[str]()
    access = PageAccess(on_redeemed=lambda: redeemed.append(access.token))
    token = access.token
    assert access.is_token(token)
    assert not access.is_token("another")
    access.redeem()
    assert not access.is_token(token)
    assert redeemed == [access.token]
    assert access.token != token


def test_only_the_session_cookie_gives_access() -> None:
    access, other = PageAccess(), PageAccess()
    session = access.redeem()
    cookie = access.set_cookie(session).partition(";")[0]
    assert access.session(cookie) == session
    assert access.session(f"theme=dark; {access.cookie}=old;{cookie}; =; x") == session
    assert other.session(cookie) is None
    for wrong in ("", "nonsense", f"{access.cookie}=", f"{access.cookie}=guess", f"x={session}"):
        assert access.session(wrong) is None
    for attribute in ("HttpOnly", "SameSite=Strict", "Path=/"):
        assert attribute in access.set_cookie(session)
    assert access.cookie != other.cookie  # ports of a machine share their cookies


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:1", True),
        ("LOCALHOST", True),
        ("[::1]:80", True),
        ("127.0.0.1.evil.example:8000", False),
        ("evil.example", False),
        ("127.0.0.2:80", False),
        ("", False),
    ],
)
def test_only_loopback_host_headers_are_accepted(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_only_the_origin_of_the_web_ui_is_accepted() -> None:
    assert is_own("http://127.0.0.1:8000", "127.0.0.1:8000")
    for origin in ("", "null", "http://127.0.0.1:8001", "https://127.0.0.1:8000", "http://evil"):
        assert not is_own(origin, "127.0.0.1:8000")


def test_content_security_policy_allows_no_external_or_inline_code() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


MAPPED = f"{'0' * 16}FFFF0000"
"""Prefix of an IPv4 address that is written as an IPv6 one."""
CLIENT, SERVER = ("127.0.0.1", 0xD78C), ("127.0.0.1", 0x8A37)
MINE, OTHERS = os.getuid(), os.getuid() + 1


def connection(local: str, remote: str, user: int) -> str:
    state = "01 00000000:00000000 00:00000000 00000000"
    return f"   1: {local} {remote} {state} {user:5} 0 1609 1 000000005b6a4d90 100 0 0 10 0"


@pytest.mark.skipif(sys.byteorder != "little", reason="the lines are those of such a machine")
@pytest.mark.parametrize(
    ("lines", "stranger"),
    [
        ([connection("0100007F:D78C", "0100007F:8A37", OTHERS)], OTHERS),
        ([connection("0100007F:D78C", "0100007F:8A37", MINE)], None),
        ([connection("0100007F:D78C", "0100007F:8A37", 0)], None),
        ([connection(f"{MAPPED}0100007F:D78C", f"{MAPPED}0100007F:8A37", OTHERS)], OTHERS),
        # Only the browser's end of this connection counts, not another connection from the same
        # port or the server's end.
        ([connection("0100007F:D78C", "0100007F:0050", 0),
          connection("0100007F:8A37", "0100007F:D78C", MINE),
          connection("0100007F:D78C", "0100007F:8A37", OTHERS)], OTHERS),
        (["", "nonsense"], None),
    ],
)  # fmt: skip
def test_connection_of_another_user_of_the_machine_is_detected(
    lines: list[str], stranger: int | None
) -> None:
    assert other_user(CLIENT, SERVER, lines) == stranger


def test_user_who_called_sudo_is_not_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", f"{OTHERS}")
    line = connection("0100007F:D78C", "0100007F:8A37", OTHERS)
    assert other_user(CLIENT, SERVER, [line]) is None
