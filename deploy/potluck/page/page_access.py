"""Who may talk to the page's server: this machine's browser, once it has shown the token.

The server listens on the loopback address, which every process and every web page open on this
machine can reach. So a request counts only with

- a `Host` of this machine: a name that an attacker resolves to 127.0.0.1 is none (DNS rebinding);
- the cookie that the token in the printed address was exchanged for, once;
- for a change, an `Origin` that is the page's own, and a JSON body, which no other page's form
  sends.

What is answered may load scripts, styles and data from the page's server only, runs no inline
script and can't be framed.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_MOST_SESSIONS: Final = 32

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""


class PageAccess:
    """The token to be shown next, and the browsers that have shown one."""

    def __init__(self, on_redeemed: Callable[[], None] = lambda: None) -> None:
        """on_redeemed: called when a token was exchanged, and `token` is another one."""
        self.token = secrets.token_urlsafe(24)
        # Cookies are shared by all ports of a machine, on which other pages may be served.
        self.cookie = f"potluck-page-{secrets.token_hex(4)}"
        self._on_redeemed = on_redeemed
        self._sessions: list[str] = []

    def redeem(self, token: str) -> str | None:
        """The cookie for a token, which is worth nothing afterwards; None for a wrong one."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(24)
        session = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions[1 - _MOST_SESSIONS :], session]
        self._on_redeemed()
        return session

    def set_cookie(self, session: str) -> str:
        """The `Set-Cookie` header: for this server alone, not readable by scripts, ends with the
        browser."""
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict"

    def admits(self, cookies: str) -> bool:
        """Return whether a `Cookie` header holds a cookie of this server's."""
        try:
            found = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        given = b"" if found is None else found.value.encode()
        return any(hmac.compare_digest(given, each.encode()) for each in self._sessions)


def is_loopback(host: str) -> bool:
    """Return whether a `Host` header names this machine."""
    name, _, port = host.rpartition(":")
    if not port.isdecimal() or not name:
        name = host
    return name.lower() in _LOOPBACK


def is_own(origin: str, host: str) -> bool:
    """Return whether an `Origin` header is that of the page which `host` serves."""
    return origin == f"http://{host}"
