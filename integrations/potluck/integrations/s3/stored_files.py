"""Files through the object store: where hosts may fetch and put them, and what goes when."""

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
"""Updates that nobody has fetched for so long are put anew where they are still wanted."""
_AT_ONCE: Final = 1000


class StoredFiles(FileStore):
    """Models and updates in the store of `[files]`. Lives on the event loop."""

    def __init__(
        self, settings: FilesSettings, files: ModelFiles, instruments: Instruments
    ) -> None:
        """Raises ConfigurationError where the store can't be used whatever happens."""
        self.store = ObjectStore(settings, instruments)
        self.updates = StoredUpdates(self.store)
        self._models = StoredModels(self.store, files)
        self._files = files
        self._direct = settings.fallback

    @property
    def address(self) -> str:
        """Where the store is, for people."""
        return self.store.address

    async def probe(self) -> str:
        """Ask the store for something; what is wrong with it, or empty."""
        return await self.store.probe()

    def require_direct(self, host_name: str) -> None:
        """Raise ConfigurationError where files go through the store alone."""
        if not self._direct:
            raise ConfigurationError(
                f"files of this federation move through {self.store.address} alone, which host "
                f"'{host_name}' does not use; install potluck[s3] there and name the store in its "
                "`object_stores`, or set fallback = true in [files] of the coordinator",
                host=host_name,
            )

    async def model(self, blake3: str, *, distrust: bool) -> transfer_pb2.StoredFile | None:
        """Where a host may fetch a model file; None where it is to come from here.

        distrust: what was there is said not to be the file. Raises NotFoundError,
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
        """Where a host may put an announced update, and whether it may lie there already.

        None where it is to be sent here. Raises ProtocolError, ObjectStoreError.
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
        """Check the store, as an update that a host put there is not what it announced: either of
        them may be at fault."""
        with contextlib.suppress(ObjectStoreError):
            await self.store.check_probe()

    # Tidying up -------------------------------------------------------------------------------

    async def sweep_for_ever(self) -> None:
        """Sweep now and then, until cancelled."""
        while True:
            try:
                await self.sweep()
            except UnreachableError as error:
                log.debug("object store not swept", cause=error.message)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete models that the coordinator has deleted, and updates that were left there.

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
        """Whether a model came back, or came up, while the store was being listed."""
        folder, _, name = key.partition("/")
        return f"{folder}/" == stored_models.FOLDER and (self._files.folder / name).is_file()

    async def close(self) -> None:
        """End what is under way."""
        await self.updates.close()
