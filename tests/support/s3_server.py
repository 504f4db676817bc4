"""moto's S3 server in its own process. Its objects are lost when it is killed.

It sends changed bytes of objects while a file `lies` exists in the folder of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

from potluck.deploy.local.demo_files import reserved_port

BUCKET = "federation"
PREFIX = "one/files"
SECRET = "not-to-be-told"  # noqa: S105  # looked for where it must not be
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET}

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_REQUEST = re.compile(r'"(?:\x1b\[\d+m)*([A-Z]+) (\S+) HTTP')


@dataclass
class S3Server:
    """An S3 server on a port, which a test starts and kills."""

    port: int
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _pool: urllib3.PoolManager = field(default_factory=urllib3.PoolManager)

    @property
    def origin(self) -> str:
        """The server's origin, for the hosts' setting `object_stores`."""
        return f"http://127.0.0.1:{self.port}"

    def files(self, **changes: Any) -> dict[str, Any]:
        """Return the table `files` of a coordinator's configuration, for this server."""
        store = f"s3://{BUCKET}/{PREFIX}"
        return {"store": store, "endpoint": self.origin, "fallback": False, **changes}

    @property
    def _lies(self) -> Path:
        return self.log.with_name("lies")

    def lie(self) -> None:
        """Make the server send changed bytes of objects from now on."""
        self._lies.touch()

    def tell_the_truth(self) -> None:
        """Make the server send the uploaded bytes from now on."""
        self._lies.unlink()

    async def start(self) -> None:
        """Start the server, with an empty bucket."""
        objects = f"/{BUCKET}/{PREFIX}/"
        program = Path(__file__).with_name("lying_s3.py")
        command = [sys.executable, str(program), str(self.port), objects, str(self._lies)]
        self._process = await asyncio.to_thread(self._run, command)
        async with asyncio.timeout(_START_SECONDS):
            while not await self._made():
                assert self._process.poll() is None, self.log.read_text()
                await asyncio.sleep(_LOOK_SECONDS)

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    async def _made(self) -> bool:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            answer = await asyncio.to_thread(
                self._pool.request, "PUT", f"{self.origin}/{BUCKET}", retries=False
            )
            return answer.status == 200
        return False

    def kill(self) -> None:
        """End the server by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def requests(self, method: str, folder: str) -> list[str]:
        """Return the names below a folder that were requested by this method."""
        start = f"/{BUCKET}/{PREFIX}/{folder}/"
        found = _REQUEST.findall(self.log.read_text())
        paths = [path.partition("?")[0] for asked, path in found if asked == method]
        return [path.removeprefix(start) for path in paths if path.startswith(start)]

    def put(self, folder: str, name: str, content: bytes) -> None:
        """Upload an unsolicited object."""
        url = f"{self.origin}/{BUCKET}/{PREFIX}/{folder}/{name}"
        assert self._pool.request("PUT", url, body=content).status == 200

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder."""
        url = f"{self.origin}/{BUCKET}?list-type=2&prefix={PREFIX}/{folder}/"
        text = self._pool.request("GET", url).data.decode()
        keys = re.findall(r"<Key>([^<]+)</Key>", text)
        return [key.removeprefix(f"{PREFIX}/{folder}/") for key in keys]


@contextlib.asynccontextmanager
async def s3_server(folder: Path) -> AsyncIterator[S3Server]:
    """Run a server while the block runs."""
    with reserved_port() as port:
        server = S3Server(port, folder / "s3.log")
        try:
            await server.start()
            yield server
        finally:
            server.kill()
