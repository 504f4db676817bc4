"""Cache of models on this host's disk, by the digest of their float32 file.

It deletes the least recently used models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import structlog

from potluck.common.net.transfer import check_digest
from potluck.common.tensors.spare_files import SpareFiles
from potluck.common.tensors.tensor_files import file_digest

log = structlog.get_logger()


def evictions(by_use: Sequence[str], in_use: Set[str], keep: int) -> list[str]:
    """Return the models to delete so that `keep` models stay.

    by_use: models from least to most recently used. Models in use are included in `keep`, but never
    deleted.
    """
    excess = len(by_use) - keep
    return [blake3 for blake3 in by_use if blake3 not in in_use][: max(0, excess)]


class ModelCache:
    """The models in a folder. Not thread-safe, but `verified` may run in another thread."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """List the models that an earlier process left; each must be verified before use."""
        self._folder = folder
        self._keep = keep
        self.spare = SpareFiles(folder.with_name(f"{folder.name}.spare"), keep=1)
        """The file of an evicted model, if any; it may be overwritten."""
        self._pins: Counter[str] = Counter()
        self._verified: set[str] = set()
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        self._by_use = [path.name for path in files if _is_digest(path.name)]
        for path in files:
            if not _is_digest(path.name):
                path.unlink()
        self._evict()

    def path(self, blake3: str) -> Path:
        """Return the path of a model. Raises ProtocolError for an invalid digest."""
        return self._folder / check_digest(blake3)

    def holds(self, blake3: str) -> bool:
        """Return True if a model is in the cache."""
        return blake3 in self._by_use and self.path(blake3).is_file()

    def verified(self, blake3: str) -> bool:
        """Return True if a cached model still has its digest. Blocks: reads the file once per
        process."""
        if blake3 not in self._verified:
            if file_digest(self.path(blake3)).blake3 != blake3:
                return False
            self._verified.add(blake3)
        return True

    async def intact(self, blake3: str) -> bool:
        """Return True if a model is cached with its digest; delete it if the digest differs."""
        if not self.holds(blake3):
            return False
        if await asyncio.to_thread(self.verified, blake3):
            return True
        log.warning("cached file is corrupt, deleting it", file=blake3)
        self.remove(blake3)
        return False

    def add(self, blake3: str) -> None:
        """Add a verified model whose file is at `path`; the least recently used model may be
        deleted.
        """
        self._verified.add(blake3)
        self.touch(blake3)
        self._evict()

    def touch(self, blake3: str) -> None:
        """Mark a model as used."""
        if blake3 in self._by_use:
            self._by_use.remove(blake3)
        self._by_use.append(blake3)
        with contextlib.suppress(OSError):
            os.utime(self.path(blake3))

    def make_room(self) -> None:
        """Evict models so that one more model fits."""
        self._evict(self._keep - 1)

    def remove(self, blake3: str) -> None:
        """Delete a model whose content is wrong."""
        self._verified.discard(blake3)
        if blake3 in self._by_use:
            self._by_use.remove(blake3)
        self.path(blake3).unlink(missing_ok=True)

    @contextlib.contextmanager
    def pinned(self, blake3: str) -> Iterator[None]:
        """Protect a model from eviction while the block runs; it may be added within the block."""
        self._pins[blake3] += 1
        try:
            yield
        finally:
            self._pins[blake3] -= 1
            if not self._pins[blake3]:
                del self._pins[blake3]
                self._evict()

    def _evict(self, keep: int | None = None) -> None:
        keep = self._keep if keep is None else keep
        for blake3 in evictions(self._by_use, self._pins.keys(), keep):
            self._by_use.remove(blake3)
            self._verified.discard(blake3)
            self.spare.give(self.path(blake3))


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")
