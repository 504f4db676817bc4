"""Updates in the object store: uploaded by hosts; fetched, verified and deleted here."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from potluck.common.errors import DigestMismatchError, ObjectStoreError, ProtocolError
from potluck.common.net.transfer import FileReceiver
from potluck.integrations.s3.object_store import LARGEST_PUT_BYTES, ObjectStore
from potluck.rpc.v1 import transfer_pb2

FOLDER: Final = "updates/"

_PIECE_BYTES: Final = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def update_key(header: transfer_pb2.UpdateHeader) -> str:
    """Return the key of an announced update, unique per instruction and content."""
    instruction = hashlib.sha256(f"{header.run_id}\n{header.update_id}".encode()).hexdigest()
    return f"{FOLDER}{instruction[:32]}.{header.blake3}"


class StoredUpdates:
    """Updates that hosts upload to the store. Lives on the event loop."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._deleting: dict[str, asyncio.Task[None]] = {}

    def url(self, header: transfer_pb2.UpdateHeader, sha256: str) -> str:
        """Return the upload URL of an announced update. Raises ProtocolError, ObjectStoreError."""
        if _SHA256.fullmatch(sha256) is None:
            raise ProtocolError(
                f"a SHA-256 digest is 64 lower-case hexadecimal digits, not {sha256[:80]!r}"
            )
        if header.size > LARGEST_PUT_BYTES:
            raise ObjectStoreError(
                f"an update of {header.size} bytes is too large for the object store, which "
                f"accepts {LARGEST_PUT_BYTES} per request",
                size=header.size,
            )
        return self._store.url_to_put(update_key(header), size=header.size, sha256=sha256)

    async def lies_there(self, header: transfer_pb2.UpdateHeader) -> bool:
        """Return True if an object of the announced size is stored. Raises ObjectStoreError."""
        return await self._store.size_of(update_key(header)) == header.size

    async def settled(self, header: transfer_pb2.UpdateHeader) -> None:
        """Wait for a running deletion of an update's object: it must not hit a later upload."""
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
                f"update '{header.update_id[:200]}' is not in the object store; upload it again",
                update=header.update_id[:200],
            )
        if held != size:
            self.forget(header)
            raise DigestMismatchError(
                f"the object has {held} bytes, the update was announced with {size}; upload it "
                "again",
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
                        f"the object of update '{header.update_id[:200]}' ended at {begin} of "
                        f"{size} bytes; upload it again"
                    )
                begin += len(piece)
                coming = self._begin(key, begin, size)
                receiver.write(piece)
                moved(len(piece))
        finally:
            if coming is not None:
                coming.cancel()

    def _begin(self, key: str, begin: int, size: int) -> asyncio.Task[memoryview] | None:
        """Start to fetch the next piece, while the previous one is written; None at the end."""
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
