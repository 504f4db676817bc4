"""The extension point for object stores. Hosts exchange files with an object store directly,
without the coordinator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from potluck.common.net.transfer import FileReceiver
from potluck.rpc.v1 import transfer_pb2


class FileStore(ABC):
    """Models and updates in the object store of `[files]`. Used on the event loop."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Address of the store, for messages."""

    @abstractmethod
    async def probe(self) -> str:
        """Send a request to the store. Return the reason if it fails, else an empty text."""

    @abstractmethod
    def require_direct(self, host_name: str) -> None:
        """Raise ConfigurationError if this host can't use the store, and files may not be sent
        directly."""

    @abstractmethod
    async def model(self, blake3: str, *, distrust: bool) -> transfer_pb2.StoredFile | None:
        """Return where a host may fetch a model file in the store.

        Returns None if the host must fetch the file from the coordinator. distrust: True if a host
        reported that the object in the store is not the file. Raises NotFoundError,
        ObjectStoreError.
        """

    @abstractmethod
    async def place(
        self, header: transfer_pb2.UpdateHeader, sha256: str
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Return where a host may put an announced update in the store.

        The place is None if the host must send the update to the coordinator. Also returns True if
        the update may be in the store already. Raises ProtocolError, ObjectStoreError.
        """

    @abstractmethod
    async def collect(
        self,
        header: transfer_pb2.UpdateHeader,
        receiver: FileReceiver,
        moved: Callable[[int], None],
    ) -> None:
        """Fetch the bytes of an update that its receiver does not have yet; call `moved` with their
        number.

        Raises ObjectStoreError if the update is not in the store, DigestMismatchError if its size
        differs.
        """

    @abstractmethod
    def forget(self, header: transfer_pb2.UpdateHeader) -> None:
        """Delete an update's object soon."""

    @abstractmethod
    async def doubt(self) -> None:
        """Check the store, because an object in it was not the update that its host had announced.

        The store or the host may be at fault.
        """

    @abstractmethod
    async def sweep_for_ever(self) -> None:
        """Regularly delete the objects that are no longer needed. Runs until cancelled."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel all current transfers."""
