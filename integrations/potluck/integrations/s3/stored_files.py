"""Files in the object store: URLs with which hosts fetch and upload them, and their deletion."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import structlog

from potluck.common.errors import ConfigurationError, ObjectStoreError, UnreachableError
from potluck.common.monitoring.instruments import Instruments
from potluck.common.net.transfer import FileReceiver
from potluck.integrations.s3 import stored_models, stored_updates
from potluck.integrations.s3.object_store import ObjectStore
from potluck.integrations.s3.stored_models import StoredModels, model_key
from potluck.integrations.s3.stored_updates import StoredUpdates
from potluck.rpc.v1 import transfer_pb2
from potluck.server.clock import utc
from potluck.server.config import FilesSettings
from potluck.server.file_store import FileStore
from potluck.server.store.model_files import ModelFiles

log = structlog.get_logger()

_SWEEP_SECONDS: Final = 60.0
_ABANDONED: Final = timedelta(hours=1)
"""Age at which an update in the store is deleted; hosts upload it again if it is still needed."""
_AT_ONCE: Final = 1000


class StoredFiles(FileStore):
    """Models and updates in the store of `[files]`. Lives on the event loop."""

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
        """Raise ConfigurationError if files may go through the store only."""
        if not self._direct:
            raise ConfigurationError(
                f"this federation moves files only through {self.store.address}, which host "
                f"'{host_name}' does not use; install the extra s3 there and name the store in its "
                "`object_stores`, or set fallback = true in [files] of the coordinator",
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
        """Return the upload place of an announced update; True if it may already be stored there.

        The place is None if the host must send the update to the coordinator. Raises ProtocolError,
        ObjectStoreError.
        """
        try:
            if self.store.trouble:
                await self.store.size_of(stored_updates.update_key(header))
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
                log.debug("object store not swept", cause=error.message)
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
            if (found.key.startswith(stored_models.FOLDER) and found.key not in kept)
            or (found.key.startswith(stored_updates.FOLDER) and found.modified < limit)
        ]
        gone = [key for key in gone if not self._is_kept(key)]
        for begin in range(0, len(gone), _AT_ONCE):
            await self.store.delete(gone[begin : begin + _AT_ONCE])

    def _kept_models(self) -> set[str]:
        return {model_key(path.stem) for path in self._files.folder.glob("*.safetensors")}

    def _is_kept(self, key: str) -> bool:
        """Return True if the coordinator has this model, which may be newer than the listing."""
        folder, _, name = key.partition("/")
        return f"{folder}/" == stored_models.FOLDER and (self._files.folder / name).is_file()

    async def close(self) -> None:
        """Cancel running deletions."""
        await self.updates.close()
