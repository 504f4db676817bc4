"""The metrics address of a process: /metrics, /healthz and /readyz over HTTP.

It is plain HTTP without authentication, as Prometheus and container engines expect, and therefore
on the loopback interface by default. With certificates it is HTTPS, for scrapers that have a
certificate. The server answers only GET and HEAD requests for these three paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from potluck.common.errors import ConfigurationError, IdentityError, UnreachableError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.net.identity import Role, identity_from_certificate, parse_certificates
from potluck.common.net.tls import TlsFiles

# Mutual TLS ---------------------------------------------------------------------------------------
# Hosts' own certificates are not valid for servers. If the federation's authority issued a host a
# server certificate, the host could pose as the coordinator. So metrics have a separate authority,
# created by `potluck pki init` in another folder. This authority issues a certificate with the role
# coordinator for each metrics address, and one with the role operator for each scraper.


class MetricsTls(TlsFiles):
    """Certificate files of the metrics server, and the names of the operators that may scrape."""

    scrapers: tuple[str, ...] = Field(
        min_length=1,
        description="Names of the scrapers, as in their operator certificates.",
    )

    def check(self, own: TlsFiles) -> None:
        """Raise ConfigurationError if a file can't be used, or if the same authority issued the
        process's own certificate.

        Raise IdentityError if the certificate is not valid for a server.
        """
        if _read(self.authority) == _read(own.authority):
            raise ConfigurationError(
                f"metrics_tls.authority {self.authority} is also the federation's authority, so "
                "that the owner of a metrics certificate could pose as the coordinator; create "
                "another authority with `potluck pki init`",
                path=self.authority,
            )
        self.load(Role.COORDINATOR)

    def context(self) -> ssl.SSLContext:
        """Return the server's context: TLS 1.3, and every client must have a certificate of the
        authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.key)
        return context

    def admits(self, certificate: bytes | None) -> bool:
        """Return True if the owner of this certificate may scrape. certificate: in DER form;
        None if there is none."""
        if certificate is None:
            return False
        try:
            pem = ssl.DER_cert_to_PEM_cert(certificate).encode()
            identity = identity_from_certificate(parse_certificates(pem)[0])
        except (IdentityError, ValueError):
            return False
        return identity.role is Role.OPERATOR and identity.name in self.scrapers


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}", path=path) from error


# The server ---------------------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]*):)?(?P<port>[0-9]{1,5})")
_REQUEST = re.compile(rb"(?P<method>[A-Z]+) (?P<path>/[^ ?]*)(?:\?[^ ]*)? HTTP/1\.[01]\r\n")
_LARGEST_REQUEST = 8192
_REQUEST_SECONDS = 10.0
_MOST_CONNECTIONS = 32

Ready = Callable[[], str]
"""Function that returns the reason why the process is not ready; empty if it is ready. Called on
the event loop."""


@dataclass
class Readiness:
    """Answers whether a process is ready; the process itself sets the reason why it is not.

    reason: reason why the process is not ready now; empty if it is ready. damage: reason why the
    process needs a restart to become ready; empty if it does not.
    """

    reason: str = ""
    damage: str = ""
    interruption: str = ""

    def interrupt(self, why: str) -> None:
        """Report the process as not ready. why: reason; "" reports it as ready again."""
        self.interruption = why

    def break_down(self, why: str) -> None:
        """Report the process as not ready until it is restarted."""
        self.damage = why

    def __call__(self) -> str:
        """Return the reason why the process is not ready; empty if it is ready."""
        return self.reason or self.damage or self.interruption


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; a port alone is on the loopback interface.

    Raises ConfigurationError.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigurationError(
            f"metrics address {address[:120]!r} is not HOST:PORT; write 9464, 127.0.0.1:9464 or "
            "0.0.0.0:9464",
            address=address[:120],
        )
    return (match["host"] or _LOOPBACK).strip("[]"), int(match["port"])


def _checked(address: str) -> str:
    if address:
        try:
            parse_address(address)
        except ConfigurationError as error:
            raise ValueError(error.message) from None
    return address


MetricsAddress = Annotated[
    str,
    AfterValidator(_checked),
    Field(
        description="Address that serves /metrics, /healthz and /readyz: a port (on 127.0.0.1) or\n"
        "HOST:PORT. It uses plain HTTP unless metrics_tls is set. Empty: not served.",
    ),
]
MetricsTlsOrNone = Annotated[
    MetricsTls | None,
    Field(
        description="Serve metrics over mutual TLS, to these scrapers only; for addresses that\n"
        "other machines can reach. It needs a TLS authority other than the federation's: create\n"
        "one with `potluck pki init`, issue a coordinator certificate for each metrics address,\n"
        "and an operator certificate for each scraper.",
    ),
]
"""Setting with the metrics address; empty for no metrics server."""


@contextlib.asynccontextmanager
async def monitoring(
    address: str,
    instruments: Instruments,
    ready: Ready = lambda: "",
    tls: MetricsTls | None = None,
) -> AsyncIterator[str]:
    """Serve metrics on the address while the block runs; yield the address as HOST:PORT.

    tls: certificates to serve HTTPS to the scrapers that it admits; None to serve plain HTTP to
    every client. Nothing is served if `address` is empty. Raises ConfigurationError for a malformed
    address, UnreachableError if the process can't listen on it.
    """
    if not address:
        yield ""
        return
    host, port = parse_address(address)
    server = _Server(instruments, ready, tls)
    try:
        listener = await asyncio.start_server(
            server.serve,
            host,
            port,
            limit=_LARGEST_REQUEST,
            reuse_address=True,
            ssl=None if tls is None else tls.context(),
        )
    except OSError as error:
        raise UnreachableError(
            f"can't serve metrics on {address}: {error.strerror or error}; choose another "
            "`metrics_address` or --metrics-address",
            address=address,
        ) from error
    try:
        bound = listener.sockets[0].getsockname()
        yield f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
    finally:
        listener.close()
        server.close()


class _Server:
    """Answers one request per connection."""

    def __init__(self, instruments: Instruments, ready: Ready, tls: MetricsTls | None) -> None:
        self._instruments = instruments
        self._ready = ready
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # asyncio runs it in one
        self._connections.add(task)
        try:
            if len(self._connections) <= _MOST_CONNECTIONS:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client disconnected, or did not send a valid request in time
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        match = _REQUEST.match(head)
        if match is None:
            status, kind, body = _text(HTTPStatus.BAD_REQUEST, "not a valid HTTP request")
        elif not self._admits(writer):
            status, kind, body = _text(
                HTTPStatus.FORBIDDEN,
                "metrics_tls.scrapers does not list the operator of this certificate",
            )
        elif match["method"] not in (b"GET", b"HEAD"):
            status, kind, body = _text(
                HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported"
            )
        else:
            status, kind, body = await self._page(match["path"])
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        )
        if match is None or match["method"] != b"HEAD":
            writer.write(body)
        await writer.drain()

    def _admits(self, writer: asyncio.StreamWriter) -> bool:
        if self._tls is None:
            return True
        channel = writer.get_extra_info("ssl_object")
        return channel is not None and self._tls.admits(channel.getpeercert(binary_form=True))

    async def _page(self, path: bytes) -> tuple[HTTPStatus, str, bytes]:
        if path == b"/metrics":
            body = await asyncio.to_thread(self._instruments.exposition)
            return HTTPStatus.OK, CONTENT_TYPE, body
        if path == b"/healthz":
            return _text(HTTPStatus.OK, "ok")  # this answer proves that the event loop runs
        if path == b"/readyz":
            reason = self._ready()
            return _text(
                HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, reason or "ok"
            )
        return _text(
            HTTPStatus.NOT_FOUND, "unknown path; the paths are /metrics, /healthz and /readyz"
        )


def _text(status: HTTPStatus, text: str) -> tuple[HTTPStatus, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()
