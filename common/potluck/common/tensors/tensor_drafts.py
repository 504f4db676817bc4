"""Writes tensor files piece by piece, in any order and from several threads.

Code that creates a model block by block writes each block to its place in the file, and so needs no
memory for the whole model. The file is hashed afterwards, while its pages are in the cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import StorageError
from potluck.common.interruptible import interruption
from potluck.common.tensors.digest import file_pieces, hasher
from potluck.common.tensors.holes import reserve, write_at
from potluck.common.tensors.layout import DTYPES, Layout
from potluck.common.tensors.tensor_files import FileDigest

_PIECE_BYTES: Final = 2**20


class TensorDraft:
    """A tensor file that is being written.

    Write all its tensors before you use `arrays` or `finish`.

    `put` and `put_flat` are thread-safe; pieces must not overlap.
    """

    def __init__(self, path: Path, layout: Layout, *, over: Path | None = None) -> None:
        """Create the file at `path`. over: a spare file in the same file system to overwrite.
        Raises StorageError."""
        self.path = path
        self.layout = layout
        self._data = len(layout.header)
        self._runs = list(_runs(layout))
        self._arrays: Mapping[str, NDArray[Any]] | None = None
        with self._disk():
            if over is not None:
                over.replace(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._file.truncate(layout.file_bytes)
        self._write(0, np.frombuffer(layout.header, np.uint8))

    def put(self, name: str, begin: int, block: NDArray[Any]) -> None:
        """Write elements of a tensor, from `begin` on. Raises StorageError."""
        tensor = self.layout.by_name[name]
        self._write(self._data + tensor.begin + begin * DTYPES[tensor.dtype].itemsize, block)

    def put_flat(self, begin: int, block: NDArray[Any]) -> None:
        """Write elements of the floating-point vector (`potluck.common.tensors.flat`) from `begin`
        on.

        Raises StorageError.
        """
        index = bisect_right(self._runs, begin, key=lambda run: run[0]) - 1
        position = 0
        while position < block.size:
            first, end, place, itemsize = self._runs[index]
            some = block[position : position + end - begin]
            self._write(self._data + place + (begin - first) * itemsize, some)
            begin, position, index = end, position + some.size, index + 1

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The tensors, mapped into memory: writing to an array changes the file.

        They are mapped because a strategy overwrites them. If the kernel can't read a page again
        that it wrote to disk, the process ends with SIGBUS, as in
        `potluck.common.tensors.large_arrays`. Raises StorageError if the disk has not enough space
        for the whole file.
        """
        if self._arrays is None:
            with self._disk():  # reserve disk space for later writes to the pages
                reserve(self._file.fileno(), self.layout.file_bytes)
            mapping = mmap.mmap(self._file.fileno(), self.layout.file_bytes)
            self._arrays = MappingProxyType(
                {
                    tensor.name: np.frombuffer(
                        mapping,
                        DTYPES[tensor.dtype],
                        count=tensor.elements,
                        offset=self._data + tensor.begin if tensor.elements else 0,
                    ).reshape(tensor.shape)
                    for tensor in self.layout.tensors
                }
            )
        return self._arrays

    def holds(self, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Return whether these arrays belong to this file, so that they need not be written
        again."""
        own = self._arrays
        return own is not None and all(arrays.get(name) is array for name, array in own.items())

    def finish(self, *, sync: bool = False) -> FileDigest:
        """Return digest and length of the file, which stays at `path`. Raises StorageError.

        sync: True to return only when the file is on disk. The disk writes while the file is
        hashed.
        """
        digest, check = hasher(), interruption()
        size = self.layout.file_bytes
        with self._disk(), ThreadPoolExecutor(1, thread_name_prefix="sync") as pool:
            synced = pool.submit(os.fsync, self._file.fileno()) if sync else None
            for piece in file_pieces(self._file.fileno(), 0, size, _PIECE_BYTES):
                check()
                digest.update(piece)
            if synced is not None:
                synced.result()
        return FileDigest(blake3=digest.hexdigest(), size=size)

    def close(self) -> None:
        """Stop writing. The file stays at its path; its arrays stay valid while they are in use."""
        self._arrays = None
        self._file.close()

    def _write(self, place: int, block: NDArray[Any]) -> None:
        piece = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        with self._disk():
            for begin in range(0, len(piece), _PIECE_BYTES):
                some = piece[begin : begin + _PIECE_BYTES]
                write_at(self._file.fileno(), some, place + begin)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"can't write tensor file {self.path} of {self.layout.file_bytes} bytes: "
                f"{error.strerror}",
                path=self.path,
                errno=error.errno,
            ) from error


@contextlib.contextmanager
def drafted(path: Path, layout: Layout, *, over: Path | None = None) -> Iterator[TensorDraft]:
    """Yield a draft that becomes the file `path` at the end of the block, and is deleted if the
    block raises.

    over: a spare file to overwrite. Raises StorageError.
    """
    draft = TensorDraft(path.with_name(f".{path.name[:100]}.draft"), layout, over=over)
    try:
        yield draft
        draft.path.replace(path)
    finally:
        draft.close()
        draft.path.unlink(missing_ok=True)


def _runs(layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """Yield the parts of the floating-point vector that are contiguous in a file.

    Each is (first element, end, offset in the data, bytes per element).
    """
    begin = end = place = itemsize = 0
    for tensor in layout.tensors:
        if not tensor.floating or not tensor.elements:
            continue
        size = DTYPES[tensor.dtype].itemsize
        if size != itemsize or place + (end - begin) * itemsize != tensor.begin:
            if end > begin:
                yield begin, end, place, itemsize
            begin, place, itemsize = end, tensor.begin, size
        end += tensor.elements
    if end > begin:
        yield begin, end, place, itemsize
