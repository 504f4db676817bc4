"""Access control of the web UI: only a browser on this machine that has presented the token.

The server listens on the loopback address. Every process on this machine can reach that address,
and so can every web page open in a browser here. So the server accepts a request only with

- a `Host` of this machine: an attacker's name that resolves to 127.0.0.1 is refused (DNS
  rebinding);
- the session cookie. The token in the printed address is exchanged for it, once, by a process of
  the same user: other users can read a browser's command line, which contains that address;
- for a change, an `Origin` that is the web UI's own, and a JSON body, which a form on another page
  can't send.

Pages that the server sends load scripts, styles and data from this server only. They run no inline
script and can't be framed.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_MOST_SESSIONS: Final = 32
_USER: Final = 7
"""Index of the user id's column in `/proc/net/tcp`."""

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
"""Headers of every response."""


class PageAccess:
    """The currently valid token, and the sessions of browsers that have presented a token."""

    def __init__(self, on_redeemed: Callable[[], None] = lambda: None) -> None:
        """on_redeemed: function called after a token was exchanged and replaced by the next one."""
        self.token = secrets.token_urlsafe(24)
        # All ports of a machine share cookies, and other programs may serve pages on other ports.
        self.cookie = f"potluck-page-{secrets.token_hex(4)}"
        self._on_redeemed = on_redeemed
        self._sessions: list[str] = []

    def is_token(self, token: str) -> bool:
        """Return True if this is the currently valid token."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def redeem(self) -> str:
        """Return a new cookie in exchange for the token, which becomes invalid."""
        self.token = secrets.token_urlsafe(24)
        session = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions[1 - _MOST_SESSIONS :], session]
        self._on_redeemed()
        return session

    def set_cookie(self, session: str) -> str:
        """Return the `Set-Cookie` header.

        The cookie is for this server only, scripts can't read it, and it ends with the browser.
        """
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict"

    def session(self, cookies: str) -> str | None:
        """Return this server's session in a `Cookie` header; None if it has none."""
        for part in cookies.split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.cookie:
                given = value.encode()
                for each in self._sessions:
                    if hmac.compare_digest(given, each.encode()):
                        return each
        return None


def is_loopback(host: str) -> bool:
    """Return True if a `Host` header names this machine."""
    name, _, port = host.rpartition(":")
    if not port.isdecimal() or not name:
        name = host
    return name.lower() in _LOOPBACK


def other_user(
    client: tuple[str, int], server: tuple[str, int], connections: Iterable[str] | None = None
) -> int | None:
    """Return the user id of a connection's other end, if it is another user of this machine.

    client, server: addresses and ports of the connection's ends. connections: lines as in Linux'
    `/proc/net/tcp`, those of this machine by default. Return None if it is this process's user, the
    user who called `sudo`, or root; also if the system does not report the user.
    """
    ends = [_in_hexadecimal(client), _in_hexadecimal(server)]
    for line in _connections() if connections is None else connections:
        columns = line.split()
        # An IPv6 address may end with an IPv4 address.
        if len(columns) > _USER and all(map(str.endswith, columns[1:3], ends)):
            user = int(columns[_USER])
            return None if user in _own_users() else user
    return None


def _in_hexadecimal(end: tuple[str, int]) -> str:
    """Return address and port as the kernel writes them; the address is in machine byte order."""
    host, port = end
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


def _connections() -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            yield from Path("/proc/net", name).read_text().splitlines()[1:]


def _own_users() -> set[int]:
    caller = os.environ.get("SUDO_UID", "")
    return {0, os.getuid()} | ({int(caller)} if caller.isdecimal() else set())


def is_own(origin: str, host: str) -> bool:
    """Return True if an `Origin` header is that of the page which `host` serves."""
    return origin == f"http://{host}"
