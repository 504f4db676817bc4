"""Upload of an update through an object store: announce it, store it, then submit its header."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from potluck.client.transfer.link import Link
from potluck.client.transfer.object_stores import FileRoute
from potluck.common.errors import DigestMismatchError, PotluckError
from potluck.rpc.v1 import coordinator_pb2 as rpc
from potluck.rpc.v1 import transfer_pb2


class StoredUpload:
    """One update and its route. fresh: True if no part of it has been uploaded before."""

    def __init__(self, link: Link, path: Path, *, fresh: bool) -> None:
        self._link = link
        self._path = path
        self._put = not fresh
        self._sha256 = ""
        self._route = FileRoute(link.stores)

    @property
    def through_store(self) -> bool:
        """True if the next attempt goes through a store."""
        return self._route.through_store

    def failed(self, error: PotluckError) -> bool:
        """Record a failed attempt; return the result of `FileRoute.failed`."""
        if isinstance(error, DigestMismatchError):
            self._put = False
        return self._route.failed(error)

    async def attempt(self, announced: transfer_pb2.UpdateHeader) -> int | None:
        """Deliver the announced update. Returns None once the coordinator has it.

        Otherwise returns the offset from which the update must be sent directly. Raises
        ObjectStoreError, and what the coordinator raises.
        """
        if not self._sha256:
            self._sha256 = await asyncio.to_thread(_sha256_of, self._path)
        header = transfer_pb2.UpdateHeader()
        header.CopyFrom(announced)
        header.stored = self._put
        request = rpc.LocateUploadRequest(
            update_id=header.update_id,
            run_id=header.run_id,
            client_id=header.client_id,
            blake3=header.blake3,
            header=header,
            sha256=self._sha256,
        )
        located = await self._link.stub.LocateUpload(request)
        if located.complete:
            return None
        if not located.HasField("place"):
            return min(located.offset, header.size)
        url = self._route.url(located.place)
        if not (located.stored and self._put):
            await self._link.stores.put(url, self._path, size=header.size, sha256=self._sha256)
            self._put = True
        header.stored = True
        await self._link.submit_update(_announcing(header))
        self._route.worked()
        return None


async def _announcing(header: transfer_pb2.UpdateHeader) -> AsyncIterator[rpc.SubmitUpdateRequest]:
    yield rpc.SubmitUpdateRequest(frame=transfer_pb2.UpdateFrame(header=header))


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
