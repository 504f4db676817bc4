"""An object store in this process, with errors that a test sets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Change = Callable[[bytes], bytes]


@dataclass
class FakeStore:
    """Object store: its objects by path, and its deliberate errors on the next requests."""

    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers of each request."""
    changes: list[Change] = field(default_factory=list)
    """Changes made to the contents of the next answers."""
    cuts: list[int] = field(default_factory=list)
    """Numbers of bytes after which the next answers break off."""
    statuses: list[int] = field(default_factory=list)
    """HTTP statuses of the next answers, in place of the contents."""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.asked]


@contextlib.contextmanager
def fake_store() -> Iterator[FakeStore]:
    store = FakeStore()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self._refused():
                return
            content = store.objects.get(self.path)
            if content is None:
                self._answer(404)
                return
            if store.changes:
                content = store.changes.pop(0)(content)
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=")[:-1])
            if begin >= len(content):
                self._answer(416)
                return
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(len(content) - begin))
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            end = begin + store.cuts.pop(0) if store.cuts else len(content)
            self.wfile.write(content[begin:end])
            self.close_connection = end < len(content)

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if not self._refused():
                store.objects[self.path] = content
                self._answer(200)

        def _refused(self) -> bool:
            store.asked.append((self.command, self.path, dict(self.headers)))
            if not store.statuses:
                return False
            self._answer(store.statuses.pop(0))
            return True

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Location", f"{store.origin}/elsewhere")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  name of the base class
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    store.port = server.server_address[1]
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield store
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
