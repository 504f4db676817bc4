"""Requests to object stores, by presigned URLs.

Blocking; a stalled transfer fails after a short timeout.

A fetched file is verified, or the call raises an exception. Bytes beyond the announced size and
error pages are not read, and redirections are not followed.
"""

from __future__ import annotations

import contextlib
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import urllib3
from urllib3.exceptions import HTTPError

from potluck.common.errors import (
    ConfigurationError,
    ObjectStoreError,
)
from potluck.common.net.protocol import CHUNK_BYTES
from potluck.common.net.transfer import FileReceiver

_CONNECT_SECONDS: Final = 10.0
_STALL_SECONDS: Final = 15.0
_OK: Final = 200
_PARTIAL: Final = 206

Begin = Callable[[int], FileReceiver]
"""Function that returns a file's receiver, which continues at the given offset."""

Moved = Callable[[int], None]
"""Function that is called with the number of transferred bytes. It raises an exception if the
transfer is cancelled."""


class StoreRequests:
    """Downloads and uploads files. Thread-safe."""

    def __init__(self, authority: Path | None) -> None:
        """`authority`: file of the stores' TLS authority; None: the system's authorities.

        Raises ConfigurationError if the file can't be used.
        """
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            cause = error.strerror or "the file has no certificate in PEM form"
            raise ConfigurationError(
                f"can't use the authority file {authority}: {cause}"
            ) from error
        self._pool = urllib3.PoolManager(
            ssl_context=context,
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=_STALL_SECONDS),
            retries=False,
            blocksize=CHUNK_BYTES,
        )

    def fetch(self, url: str, begin: Begin, *, offset: int, moved: Moved) -> None:
        """Fetch a file from `offset` on, and verify it.

        Fetches all of it if the store can't send parts.

        Raises ObjectStoreError if the store does not answer, refuses or disconnects, and the errors
        of `FileReceiver.finish`.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        with _explained(url):
            response = self._pool.request(
                "GET",
                url,
                headers=headers,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            with contextlib.closing(response):
                receiver = begin(_start(response, offset, url))
                with contextlib.closing(receiver):
                    _take(response, receiver, moved)
                    receiver.finish(receiver.blake3)

    def put(self, url: str, path: Path, *, size: int, sha256: str, moved: Moved) -> None:
        """Upload a file of this size and SHA-256 digest (hexadecimal). Raises ObjectStoreError."""
        headers = {
            "Content-Length": str(size),
            "x-amz-checksum-sha256": b64encode(bytes.fromhex(sha256)).decode(),
        }
        with _explained(url):
            response = self._pool.request(
                "PUT",
                url,
                body=_pieces(path, moved),
                headers=headers,
                redirect=False,
                preload_content=False,
            )
            with contextlib.closing(response):
                if response.status != _OK:
                    raise _refused(url, response.status)


def _take(response: urllib3.BaseHTTPResponse, receiver: FileReceiver, moved: Moved) -> None:
    """Write the received bytes, up to the announced size; verification finds missing bytes."""
    for chunk in response.stream(CHUNK_BYTES, decode_content=False):
        receiver.write(chunk[: receiver.size - receiver.received])
        moved(len(chunk))
        if receiver.received == receiver.size:
            return


def _start(response: urllib3.BaseHTTPResponse, offset: int, url: str) -> int:
    """Return the offset at which a response begins. Raises ObjectStoreError if it is not a file."""
    if response.status == _OK:
        return 0
    if response.status == _PARTIAL:
        if response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            return offset
        raise ObjectStoreError(
            f"the object store {_host(url)} sent the wrong part of a file; the requested part "
            f"begins at byte {offset}"
        )
    raise _refused(url, response.status)


def _refused(url: str, status: int) -> ObjectStoreError:
    return ObjectStoreError(f"the object store {_host(url)} refused a request with status {status}")


def _pieces(path: Path, moved: Moved) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
            moved(len(piece))


def _host(url: str) -> str:
    """Return a URL's host, for messages: the URL's query grants access and must not be shown."""
    return "/".join(url.split("/", 3)[:3])[:200]


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn urllib3's exceptions in the block into ObjectStoreError."""
    try:
        yield
    except HTTPError as error:  # its text contains the URL, which grants access
        cause = type(error).__name__
        raise ObjectStoreError(f"the object store {_host(url)} failed: {cause}") from None
