"""The seam for object stores: where hosts may fetch files and put them, beside the coordinator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from potluck.common.net.transfer import FileReceiver
from potluck.rpc.v1 import transfer_pb2


class FileStore(ABC):
    """Models and updates in the store of `[files]`. Lives on the event loop."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, for people."""

    @abstractmethod
    async def probe(self) -> str:
        """Ask the store for something; what is wrong with it, or empty."""

    @abstractmethod
    def require_direct(self, host_name: str) -> None:
        """Raise ConfigurationError where files go through the store alone."""

    @abstractmethod
    async def model(self, blake3: str, *, distrust: bool) -> transfer_pb2.StoredFile | None:
        """Where a host may fetch a model file; None where it is to come from here.

        distrust: what was there is said not to be the file. Raises NotFoundError,
        ObjectStoreError.
        """

    @abstractmethod
    async def place(
        self, header: transfer_pb2.UpdateHeader, sha256: str
    ) -> tuple[transfer_pb2.StoredFile | None, bool]:
        """Where a host may put an announced update, and whether it may lie there already.

        None where it is to be sent here. Raises ProtocolError, ObjectStoreError.
        """

    @abstractmethod
    async def collect(
        self,
        header: transfer_pb2.UpdateHeader,
        receiver: FileReceiver,
        moved: Callable[[int], None],
    ) -> None:
        """Fetch what a receiver lacks of an update; `moved` is told how many bytes came.

        Raises ObjectStoreError where it is not there, DigestMismatchError for another size.
        """

    @abstractmethod
    def forget(self, header: transfer_pb2.UpdateHeader) -> None:
        """Delete an update's object soon."""

    @abstractmethod
    async def doubt(self) -> None:
        """Check the store, as an update that a host put there is not what it announced: either of
        them may be at fault."""

    @abstractmethod
    async def sweep_for_ever(self) -> None:
        """Delete now and then what nobody needs, until cancelled."""

    @abstractmethod
    async def close(self) -> None:
        """End what is under way."""
