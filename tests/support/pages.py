"""The web UI's server, and requests to it from browsers and other programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from potluck.deploy.operator.operator_config import OperatorConfig
from potluck.page.page_access import PageAccess
from potluck.page.page_app import PageServer
from potluck.page.page_command import serving_page

PATIENCE_SECONDS = 240.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class OpenPage:
    """A running server of the web UI. cookie: cookie of a browser that has opened it; empty at
    first."""

    port: int
    access: PageAccess
    cookie: str = ""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """Address that opens the page in a browser; valid once."""
        return f"{self.origin}/?token={self.access.token}"

    async def opened(self) -> OpenPage:
        """Exchange the token for a cookie; return the page with it."""
        answer = await self.request("GET", f"/?token={self.access.token}", cookie="")
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return self

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def post(self, path: str, body: object) -> Answer:
        headers = {"Origin": self.origin, "Content-Type": "application/json"}
        return await self.request("POST", path, body=json.dumps(body), headers=headers)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: str = "",
        cookie: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request; return the complete answer."""
        async with self._sent(method, path, body, cookie, headers) as reader:
            status, found = await _head(reader)
            return Answer(status, found, (await reader.read()).decode())

    @contextlib.asynccontextmanager
    async def events(self, path: str) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """Open a stream of server-sent events; each has a name and data."""
        async with self._sent("GET", path, "", None, None) as reader:
            await _head(reader)
            yield _events(reader)

    @contextlib.asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        body: str,
        cookie: str | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncIterator[asyncio.StreamReader]:
        sent = {
            "Host": f"127.0.0.1:{self.port}",
            "Connection": "close",
            "Cookie": self.cookie if cookie is None else cookie,
            **({"Content-Length": str(len(body.encode()))} if method == "POST" else {}),
            **(headers or {}),
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in sent.items())]
        async with asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
                yield reader
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    while line := await reader.readline():
        text = line.decode()
        if text.startswith("event: "):
            kind = text.removeprefix("event: ").strip()
        elif text.startswith("data: "):
            while not text.endswith("\n"):
                text += (await reader.readline()).decode()
            yield kind, json.loads(text.removeprefix("data: "))


@contextlib.asynccontextmanager
async def running_page(config: OperatorConfig) -> AsyncIterator[OpenPage]:
    """Serve the page on a free port, on this event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        access = PageAccess()
        pages = PageServer(config, access)
        async with serving_page(pages, pages.app(), listening):
            yield OpenPage(port=listening.getsockname()[1], access=access)
