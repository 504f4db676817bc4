"""Downloads a round's model into a cache, once for all clients of the host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from potluck.client.training.update_encoding import decode_model
from potluck.client.transfer.file_download import FileDownloads
from potluck.client.transfer.link import Link
from potluck.client.transfer.model_cache import ModelCache
from potluck.common.errors import NotFoundError, ProtocolError, TooLargeError, TransferError
from potluck.common.interruptible import shielded
from potluck.common.net.transfer import check_digest
from potluck.common.tensors.layout import Layout
from potluck.rpc.v1 import transfer_pb2

log = structlog.get_logger()

LayoutSource = Callable[[], Awaitable[Layout]]
"""Function that returns the layout of the task's model, which only some encodings need."""


class Downloads:
    """Fetches models into the cache. Runs on the event loop; blocking work goes to threads."""

    def __init__(self, link: Link, cache: ModelCache, folder: Path, *, maximum_bytes: int) -> None:
        """`folder`: holds unfinished downloads, also from earlier processes."""
        self.cache = cache
        self._files = FileDownloads(link, folder, maximum_bytes=maximum_bytes, spare=cache.spare)
        self._maximum = maximum_bytes
        self._under_way: dict[str, asyncio.Task[Path]] = {}
        self._waiting: Counter[str] = Counter()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by model; a cancelled download keeps its lock until its thread has ended."""

    async def obtain(self, reference: transfer_pb2.ModelReference, layout: LayoutSource) -> Path:
        """Return the path of a model; download it if needed.

        Use the file only within `pinned` of the cache, which protects it from deletion.

        Clients that want the same model share one download, which is cancelled when no client waits
        for it any more. Retries while the coordinator can't be reached. Raises DigestMismatchError,
        NotFoundError, TooLargeError, ProtocolError or StorageError.
        """
        blake3 = check_digest(reference.blake3)
        task = self._under_way.get(blake3)
        if task is None:
            task = asyncio.create_task(self._obtain_alone(reference, layout))
            self._under_way[blake3] = task
            task.add_done_callback(lambda done: self._forget(blake3, done))
        self._waiting[blake3] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[blake3] -= 1
            if not self._waiting[blake3]:
                del self._waiting[blake3]
                if not task.done():
                    self._forget(blake3, task)
                    task.cancel()

    def _forget(self, blake3: str, task: asyncio.Task[Path]) -> None:
        if self._under_way.get(blake3) is task:
            del self._under_way[blake3]

    async def _obtain_alone(
        self, reference: transfer_pb2.ModelReference, layout: LayoutSource
    ) -> Path:
        async with self._locks.setdefault(reference.blake3, asyncio.Lock()):
            return await self._obtain(reference, layout)

    async def _obtain(self, reference: transfer_pb2.ModelReference, layout: LayoutSource) -> Path:
        blake3 = reference.blake3
        if await self.cache.intact(blake3):
            self.cache.touch(blake3)
            return self.cache.path(blake3)
        if reference.size > self._maximum:
            raise _too_large(reference.size, self._maximum)
        trouble: TransferError | NotFoundError | None = None
        for rendition in reference.renditions:
            base = rendition.base_blake3
            with self.cache.pinned(base or blake3):
                if base and not await self.cache.intact(base):
                    continue
                try:
                    return await self._fetch(reference, rendition, layout)
                except (TransferError, NotFoundError) as error:
                    if isinstance(error, TooLargeError):
                        raise
                    log.warning("model file unusable", model=blake3, error=error.message)
                    trouble = error
        raise trouble or ProtocolError(
            f"this host can't use any of the {len(reference.renditions)} files offered for model "
            f"{blake3[:12]}…; the last file must be a whole model",
            blake3=blake3,
        )

    async def _fetch(
        self,
        reference: transfer_pb2.ModelReference,
        rendition: transfer_pb2.Rendition,
        layout: LayoutSource,
    ) -> Path:
        """Fetch one rendition (encoded form) of a model, decode and verify it, add it to the
        cache."""
        self.cache.make_room()
        target = self.cache.path(reference.blake3)
        fetched = self._files.path(rendition.blake3)
        whole = rendition.blake3 == reference.blake3
        try:
            await self._files.fetch(rendition.blake3, rendition.size)
            if whole:
                fetched.replace(target)
            else:
                base = rendition.base_blake3
                decoding = asyncio.to_thread(
                    decode_model,
                    fetched,
                    target,
                    blake3=reference.blake3,
                    encoding=rendition.encoding,
                    compressed=rendition.compressed,
                    maximum_bytes=self._maximum,
                    base=self.cache.path(base) if base else None,
                    layout=None if base else await layout(),
                )
                await shielded(decoding)
        except asyncio.CancelledError:
            # Keep a model that is complete, so that the next client need not fetch it again.
            if whole:
                with contextlib.suppress(OSError):  # usually it is incomplete
                    fetched.replace(target)
                    self.cache.add(reference.blake3)
            raise
        finally:
            fetched.unlink(missing_ok=True)
        self.cache.add(reference.blake3)
        return target


def _too_large(size: int, maximum: int) -> TooLargeError:
    return TooLargeError(
        f"the model has {size} bytes, but this host accepts at most {maximum}; raise "
        "maximum_model_bytes of the host",
        size=size,
        maximum=maximum,
    )
