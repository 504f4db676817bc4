"""The object stores that a host's owner allows, and the route of each file.

The coordinator sends the URL of a file to fetch or upload. The owner decides to which addresses
this host may connect. Files from a store are used only after their digest is verified.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import structlog

from potluck.client.base.host_metrics import HostMetrics
from potluck.common.errors import (
    ConfigurationError,
    DigestMismatchError,
    ObjectStoreError,
    PotluckError,
    TransferError,
)
from potluck.common.monitoring.metric_labels import Direction
from potluck.common.net.transfer import FileReceiver
from potluck.common.settings import plugins
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

_ATTEMPTS: Final = 3
"""Number of attempts through a store before a file is sent directly."""
_LONGEST_URL: Final = 8192


class FileRequests(Protocol):
    """The extension point for requests to object stores. Thread-safe; calls block."""

    def fetch(
        self,
        url: str,
        begin: Callable[[int], FileReceiver],
        *,
        offset: int,
        moved: Callable[[int], None],
    ) -> None:
        """Fetch a file from `offset` on, or all of it if the store can't send parts, and verify it.

        Raises ObjectStoreError if the store does not answer, refuses or breaks off, and what
        `FileReceiver.finish` raises.
        """

    def put(
        self, url: str, path: Path, *, size: int, sha256: str, moved: Callable[[int], None]
    ) -> None:
        """Upload a file of this size and SHA-256 digest (hexadecimal). Raises ObjectStoreError."""


class ObjectStores:
    """The object stores from which this host may download and to which it may upload.

    Runs on the event loop."""

    def __init__(
        self,
        origins: Sequence[str] = (),
        *,
        authority: Path | None = None,
        metrics: HostMetrics | None = None,
    ) -> None:
        """See `object_stores` and `object_store_authority` in `config.py`.

        Raises ConfigurationError; MissingLibraryError if the extra s3 is not installed.
        """
        self._origins = frozenset(origins)
        self._metrics = metrics or HostMetrics()
        self.offered = False
        """True if the coordinator offers transfers through a store."""
        self.doubtful = False
        """True if the last file planned for a store was sent directly instead."""
        self._wrong = False
        if origins:
            maker = plugins.integration("object-store-requests")
            self._requests = cast(FileRequests, maker(authority))

    @property
    def usable(self) -> bool:
        """True if the coordinator offers a store and the owner allows at least one."""
        return self.offered and bool(self._origins)

    def allows(self, url: str) -> bool:
        """Return True if the owner allows the store that a URL addresses."""
        if len(url) > _LONGEST_URL or not url.isascii() or not url.isprintable():
            return False
        try:
            parts = urlsplit(url)
        except ValueError:
            return False
        return f"{parts.scheme}://{parts.netloc}" in self._origins

    def sent_other_bytes(self, origin: str) -> None:
        """Log, once, that the store at this address returned bytes that differ from the upload."""
        if not self._wrong:
            remedy = (
                "check the store, the proxies and the caches in front of it; files are tried again"
            )
            log.warning(
                "object store returned different bytes than were stored",
                store=origin,
                remedy=remedy,
            )
        self._wrong = True

    def sent_right_bytes(self) -> None:
        """Note that a file was transferred correctly; log it if a store had sent wrong bytes."""
        if self._wrong:
            log.info("object store recovered: its bytes match their digest")
        self._wrong = False

    async def fetch(self, url: str, begin: Callable[[int], FileReceiver], *, offset: int) -> None:
        """See `FileRequests.fetch`."""

        def fetched(check: Callable[[], None]) -> None:
            moved = self._counting(Direction.DOWN, check)
            self._requests.fetch(url, begin, offset=offset, moved=moved)

        await _in_thread(fetched)

    async def put(self, url: str, path: Path, *, size: int, sha256: str) -> None:
        """See `FileRequests.put`."""

        def put(check: Callable[[], None]) -> None:
            moved = self._counting(Direction.UP, check)
            self._requests.put(url, path, size=size, sha256=sha256, moved=moved)

        await _in_thread(put)

    def _counting(self, direction: Direction, check: Callable[[], None]) -> Callable[[int], None]:
        def moved(size: int) -> None:
            check()
            self._metrics.moved(direction, size)
            self._metrics.moved_through_store(direction, size)

        return moved


class FileRoute:
    """The route of one file: through a store while that works, then directly if that is allowed."""

    def __init__(self, stores: ObjectStores) -> None:
        self._stores = stores
        self._straight = False
        self._may_be_straight = False
        self._failures = 0
        self._asked = ""  # address of the store that the current attempt uses
        self.distrust = False
        """True if a store has sent bytes that don't match the file's digest."""

    @property
    def through_store(self) -> bool:
        """True if the next attempt goes through a store."""
        return self._stores.usable and not self._straight

    def url(self, place: transfer_pb2.StoredFile) -> str:
        """Return the URL of a place that the coordinator names.

        If the owner does not allow the store, raises ObjectStoreError if the file may be sent
        directly instead, otherwise ConfigurationError.
        """
        self._may_be_straight = place.direct
        origin = "/".join(place.url.split("/", 3)[:3])
        if self._stores.allows(place.url):
            self._asked = origin
            return place.url
        remedy = "to use this store, add it to `object_stores` of this host"
        if not place.direct:
            raise ConfigurationError(
                f"this host may not use the object store {origin[:200]!r}; {remedy}",
                store=origin[:200],
            )
        self._straight = True
        log.warning("object store not allowed", store=origin[:200], remedy=remedy)
        raise ObjectStoreError(f"the object store {origin[:200]!r} is not allowed on this host")

    def worked(self) -> None:
        """Note that the file was transferred."""
        if self.through_store:
            self._stores.doubtful = False
            self._stores.sent_right_bytes()

    def failed(self, error: PotluckError) -> bool:
        """Record a failed attempt; return True if the attempt does not count towards the maximum.

        It does not count if the host now switches to direct transfer, or if the store sent wrong
        bytes and the host waits for the store to recover.
        """
        asked, self._asked = self._asked, ""
        if asked and isinstance(error, DigestMismatchError):
            self._stores.sent_other_bytes(asked)
        if not self.through_store or not isinstance(error, (ObjectStoreError, TransferError)):
            return self._straight and isinstance(error, ObjectStoreError)
        self._failures += 1
        self.distrust = self.distrust or isinstance(error, DigestMismatchError)
        most = 1 if self._stores.doubtful else _ATTEMPTS
        if self._may_be_straight and self._failures >= most:
            log.warning("file is transferred without the object store", cause=error.message)
            self._straight = self._stores.doubtful = True
        return self._straight or bool(asked and isinstance(error, DigestMismatchError))


async def _in_thread(work: Callable[[Callable[[], None]], None]) -> None:
    """Run blocking work in a thread, with a function as argument that raises after a cancellation.

    The work calls this function now and then. A cancelled caller waits until the work has ended,
    since the work may be writing to a file.
    """
    unwanted = threading.Event()

    def check() -> None:
        if unwanted.is_set():
            raise ObjectStoreError("the transfer of the file was cancelled")

    task = asyncio.ensure_future(asyncio.to_thread(work, check))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        unwanted.set()
        await asyncio.wait([task])
        task.exception()
        raise
