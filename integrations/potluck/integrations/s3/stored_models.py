"""Models in the object store: uploaded under their digest when a host first requests one."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import Final

from potluck.integrations.s3.object_store import ObjectStore
from potluck.server.clock import now
from potluck.server.store.model_files import ModelFiles

FOLDER: Final = "models/"

_ANEW_SECONDS: Final = 1.0
"""Minimum time between two uploads of an object that hosts report as wrong."""
_MOST_REMEMBERED: Final = 1000


def model_key(blake3: str) -> str:
    """Return the key of a model file."""
    return f"{FOLDER}{blake3}.safetensors"


class StoredModels:
    """Model files with a copy in the store. Lives on the event loop."""

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
            task.exception()  # retrieve it, even if no caller waits any more

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
