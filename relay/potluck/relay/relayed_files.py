"""Files for hosts: fetched once from the coordinator, and sent to every host that requests them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import WeakValueDictionary

from potluck.client.transfer.file_download import FileDownloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.common.monitoring.metric_labels import RelaySource
from potluck.common.net.transfer import check_digest
from potluck.relay.relay_metrics import RelayMetrics
from potluck.relay.relay_state import relay_disk


class RelayedFiles:
    """Files by digest. Runs on the event loop; blocking work runs in threads."""

    def __init__(
        self,
        link: Link,
        cache: ModelCache,
        folder: Path,
        *,
        maximum_bytes: int,
        metrics: RelayMetrics,
    ) -> None:
        """`folder`: for files that are still arriving. Received parts survive a restart."""
        self._cache = cache
        self._files = FileDownloads(link, folder, maximum_bytes=maximum_bytes, spare=cache.spare)
        self._metrics = metrics
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def lent(self, blake3: str) -> AsyncIterator[Path]:
        """Yield the path of a file; the file is not deleted while the block runs.

        Requests for the same file share one download, which is retried while the coordinator can't
        be reached. Raises NotFoundError if the coordinator has no such file, DigestMismatchError,
        TooLargeError, ProtocolError, StorageError for the coordinator's disk, or RelayStorageError
        for this machine's disk.
        """
        check_digest(blake3)
        with self._cache.pinned(blake3):
            path = self._cache.path(blake3)
            lock = self._locks.setdefault(blake3, asyncio.Lock())
            with relay_disk(path):
                async with lock:
                    here = await self._cache.intact(blake3)
                    if not here:
                        await self._fetch(blake3)
            self._metrics.lent(RelaySource.CACHE if here else RelaySource.COORDINATOR)
            self._cache.touch(blake3)
            yield path

    async def _fetch(self, blake3: str) -> None:
        """Fetch a file into the cache; retry until it is complete or an error is final."""
        self._cache.make_room()
        fetched = await self._files.fetch(blake3)
        fetched.replace(self._cache.path(blake3))
        self._cache.add(blake3)
