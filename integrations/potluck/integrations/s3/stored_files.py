"""Files in the object store: URLs with which hosts fetch and upload them, and their deletion."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final

import structlog

from potluck.common.errors import (
    ConfigurationError,
    DigestMismatchError,
    ObjectStoreError,
    ProtocolError,
    UnreachableError,
)
from potluck.common.monitoring.instruments import Instruments
from potluck.common.net.transfer import FileReceiver
from potluck.integrations.s3.object_store import LARGEST_PUT_BYTES, ObjectStore
from potluck.rpc.v1 import transfer_pb2
from potluck.server.clock import now, utc
from potluck.server.config import FilesSettings
from potluck.server.file_store import FileStore
from potluck.server.store.model_files import ModelFiles

# Models -------------------------------------------------------------------------------------------

MODELS: Final = "models/"

_ANEW_SECONDS: Final = 1.0
"""Minimum seconds between two uploads of an object that hosts report as wrong."""
_MOST_REMEMBERED: Final = 1000


def model_key(blake3: str) -> str:
    """Return the key of a model file."""
    return f"{MODELS}{blake3}.safetensors"


class StoredModels:
    """Model files with a copy in the store. Runs on the event loop."""

    def __init__(self, store: ObjectStore, files: ModelFiles) -> None:
        self._store = store
        self._files = files
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._put: OrderedDict[str, float] = OrderedDict()

    async def url(self, blake3: str, *, distrust: bool) -> str:
        """Return the URL of a file, once it is stored. Concurrent callers share one upload.

        distrust: a host reports that the stored object is not the file. Raises NotFoundError if the
        coordinator has no such file, ObjectStoreError.
        """
        task = self._under_way.get(blake3)
        if task is None:
            task = asyncio.create_task(self._ensure(blake3, distrust=distrust))
            self._under_way[blake3] = task
            task.add_done_callback(lambda done: self._ended(blake3, done))
        await asyncio.shield(task)
        return self._store.url_to_fetch(model_key(blake3))

    def _ended(self, blake3: str, task: asyncio.Task[None]) -> None:
        del self._under_way[blake3]
        if not task.cancelled():
            task.exception()  # retrieve it, or asyncio logs it if no caller waits any more

    async def _ensure(self, blake3: str, *, distrust: bool) -> None:
        key = model_key(blake3)
        with self._files.lent(blake3) as path:
            held, size = await self._store.size_of(key), path.stat().st_size
            late = now() - self._put.get(blake3, -math.inf) > _ANEW_SECONDS
            if held == size and not (distrust and late):
                return
            await self._store.put(key, path, size=size)
            if distrust:
                await self._store.check(key, blake3=blake3, size=size)
        self._put[blake3] = now()
        self._put.move_to_end(blake3)
        if len(self._put) > _MOST_REMEMBERED:
            self._put.popitem(last=False)


# Updates ------------------------------------------------------------------------------------------

UPDATES: Final = "updates/"

_PIECE_BYTES: Final = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def update_key(header: transfer_pb2.UpdateHeader) -> str:
    """Return the key of an announced update, unique per instruction and content."""
    instruction = hashlib.sha256(f"{header.run_id}\n{header.update_id}".encode()).hexdigest()
    return f"{UPDATES}{instruction[:32]}.{header.blake3}"


class StoredUpdates:
    """Updates that hosts upload to the store. Runs on the event loop."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._deleting: dict[str, asyncio.Task[None]] = {}

    def url(self, header: transfer_pb2.UpdateHeader, sha256: str) -> str:
        """Return the upload URL of an announced update. Raises ProtocolError, ObjectStoreError."""
        if _SHA256.fullmatch(sha256) is None:
            raise ProtocolError(
                f"a SHA-256 digest must be 64 lower-case hexadecimal digits, not {sha256[:80]!r}"
            )
        if header.size > LARGEST_PUT_BYTES:
            raise ObjectStoreError(
                f"an update of {header.size} bytes is too large for the object store, which "
                f"accepts at most {LARGEST_PUT_BYTES} bytes per request",
                size=header.size,
            )
        return self._store.url_to_put(update_key(header), size=header.size, sha256=sha256)

    async def lies_there(self, header: transfer_pb2.UpdateHeader) -> bool:
        """Return True if an object of the announced size is stored. Raises ObjectStoreError."""
        return await self._store.size_of(update_key(header)) == header.size

    async def settled(self, header: transfer_pb2.UpdateHeader) -> None:
        """Wait for a running deletion of an update's object, which could delete a later upload."""
        key = update_key(header)
        if key in self._deleting:
            await asyncio.wait({self._deleting[key]})

    async def collect(
        self,
        header: transfer_pb2.UpdateHeader,
        receiver: FileReceiver,
        moved: Callable[[int], None],
    ) -> None:
        """Fetch the rest of an update into a receiver; `moved` is called with the bytes received.

        Raises ObjectStoreError if the object is missing, DigestMismatchError for another size.
        """
        key, size = update_key(header), header.size
        held = await self._store.size_of(key)
        if held is None:
            raise ObjectStoreError(
                f"update '{header.update_id[:200]}' is not in the object store; upload the update "
                "again",
                update=header.update_id[:200],
            )
        if held != size:
            self.forget(header)
            raise DigestMismatchError(
                f"the object of an update has {held} bytes, but the host announced {size}; upload "
                "the update again",
                held=held,
                size=size,
            )
        begin = receiver.received
        coming = self._begin(key, begin, size)
        try:
            while coming is not None:
                piece = await coming
                if not piece:
                    raise ObjectStoreError(
                        f"the object of update '{header.update_id[:200]}' ended at byte {begin} "
                        f"of {size}; upload the update again"
                    )
                begin += len(piece)
                coming = self._begin(key, begin, size)
                receiver.write(piece)
                moved(len(piece))
        finally:
            if coming is not None:
                coming.cancel()

    def _begin(self, key: str, begin: int, size: int) -> asyncio.Task[memoryview] | None:
        """Start to fetch the next piece, while the previous one is written; None at file end."""
        if begin >= size:
            return None
        piece = min(_PIECE_BYTES, size - begin)
        return asyncio.create_task(self._store.read(key, begin, piece))

    def forget(self, header: transfer_pb2.UpdateHeader) -> None:
        """Start deleting an update's object; if that fails, a later sweep deletes it."""
        key = update_key(header)
        if key not in self._deleting:
            self._deleting[key] = asyncio.create_task(self._delete(key))

    async def _delete(self, key: str) -> None:
        try:
            with suppress(ObjectStoreError):
                await self._store.delete([key])
        finally:
            del self._deleting[key]

    async def close(self) -> None:
        """Cancel running deletions."""
        deleting = list(self._deleting.values())
        for task in deleting:
            task.cancel()
        await asyncio.gather(*deleting, return_exceptions=True)


# Files --------------------------------------------------------------------------------------------

log = structlog.get_logger()

_SWEEP_SECONDS: Final = 60.0
_ABANDONED: Final = timedelta(hours=1)
"""Age at which an update in the store is deleted; hosts upload it again if it is still needed."""
_AT_ONCE: Final = 1000


class StoredFiles(FileStore):
    """Models and updates in the store of `[files]`. Runs on the event loop."""

    def __init__(
        self, settings: FilesSettings, files: ModelFiles, instruments: Instruments
    ) -> None:
        """Raises ConfigurationError if the store's settings make it unusable."""
        self.store = ObjectStore(settings, instruments)
        self.updates = StoredUpdates(self.store)
        self._models = StoredModels(self.store, files)
        self._files = files
        self._direct = settings.fallback

    @property
    def address(self) -> str:
        """The store's address, as shown in logs and errors."""
        return self.store.address

    async def probe(self) -> str:
        """Send a test request to the store; return the problem as text, or an empty text."""
        return await self.store.probe()

    def require_direct(self, host_name: str) -> None:
        """Raise ConfigurationError if hosts must use the store: this one can't."""
        if not self._direct:
            raise ConfigurationError(
                f"this federation moves files only through the object store {self.store.address}, "
                f"which host '{host_name}' does not use; on the host, install the extra s3 and "
                "name the store in `object_stores`, or set fallback = true in [files] of the "
                "coordinator",
                host=host_name,
            )

    async def model(self, blake3: str, *, distrust: bool) -> transfer_pb2.StoredFile | None:
        """Return the stored file to fetch as a model; None: fetch it from the coordinator.

        distrust: the host reports that the stored object is not the file. Raises NotFoundError,
        ObjectStoreError.
        """
        try:
            url = await self._models.url(blake3, distrust=distrust)
        except ObjectStoreError:
            if self._direct:
                return None
            raise
        return transfer_pb2.StoredFile(url=url, direct=self._direct)

    async def place(
        self, header: transfer_pb2.UpdateHeader, sha256: str
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Return the place to which a host uploads an announced update, and True if it may be
        there.

        The place is None if the host must send the update to the coordinator. Raises ProtocolError,
        ObjectStoreError.
        """
        try:
            if self.store.trouble:
                await self.store.size_of(update_key(header))
            url = self.updates.url(header, sha256)
            await self.updates.settled(header)
            there = header.stored and await self.updates.lies_there(header)
        except ObjectStoreError:
            if self._direct:
                return None, False
            raise
        return transfer_pb2.StoredFile(url=url, direct=self._direct), there

    async def collect(
        self,
        header: transfer_pb2.UpdateHeader,
        receiver: FileReceiver,
        moved: Callable[[int], None],
    ) -> None:
        """See `StoredUpdates.collect`."""
        await self.updates.collect(header, receiver, moved)

    def forget(self, header: transfer_pb2.UpdateHeader) -> None:
        """See `StoredUpdates.forget`."""
        self.updates.forget(header)

    async def doubt(self) -> None:
        """Check the store, after a stored update differed from what its host announced.

        The host or the store may be at fault.
        """
        with contextlib.suppress(ObjectStoreError):
            await self.store.check_probe()

    # Tidying up -------------------------------------------------------------------------------

    async def sweep_for_ever(self) -> None:
        """Call `sweep` at intervals, until cancelled."""
        while True:
            try:
                await self.sweep()
            except UnreachableError as error:
                log.debug("deletion of old objects in the object store failed", cause=error.message)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete models that the coordinator has deleted, and abandoned updates.

        Raises ObjectStoreError.
        """
        await self.store.check_again()
        kept = await asyncio.to_thread(self._kept_models)
        limit = utc() - _ABANDONED
        gone = [
            found.key
            for found in await self.store.listed()
            if (found.key.startswith(MODELS) and found.key not in kept)
            or (found.key.startswith(UPDATES) and found.modified < limit)
        ]
        gone = [key for key in gone if not self._is_kept(key)]
        for begin in range(0, len(gone), _AT_ONCE):
            await self.store.delete(gone[begin : begin + _AT_ONCE])

    def _kept_models(self) -> set[str]:
        return {model_key(path.stem) for path in self._files.folder.glob("*.safetensors")}

    def _is_kept(self, key: str) -> bool:
        """Return True if the coordinator has this model now, even if it came after the listing."""
        folder, _, name = key.partition("/")
        return f"{folder}/" == MODELS and (self._files.folder / name).is_file()

    async def close(self) -> None:
        """Cancel running deletions."""
        await self.updates.close()
