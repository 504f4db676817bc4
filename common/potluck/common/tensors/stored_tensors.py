"""Tensors of open files, read into memory on access.

A file is read and not mapped: if a mapped page can't be read, the kernel sends SIGBUS, which ends
the process; this can happen at any access. Here, a failed read is a StorageError that names the
file. The data are copied from the page cache, a block or one tensor at a time.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import StorageError


class OpenFile:
    """A file that is open for reading. Like a mapping, it is closed when it is
    garbage-collected."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, begin: int, length: int) -> bytes:
        """Read at most `length` bytes from `begin` on. Raises OSError."""
        return os.pread(self._descriptor, length, begin)

    def read_into(self, begin: int, out: NDArray[Any]) -> None:
        """Fill a contiguous array with the bytes from `begin` on. Raises StorageError."""
        if not out.size:
            return
        left = out.reshape(-1).view(np.uint8).data
        try:
            while left:
                length = os.preadv(self._descriptor, [left], begin)
                if not length:
                    raise OSError(errno.EIO, f"the file was shortened to {begin} bytes")
                left, begin = left[length:], begin + length
        except OSError as error:
            raise StorageError(
                f"can't read tensor file {self.path}: {error.strerror}",
                path=self.path,
                errno=error.errno,
            ) from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an open file. begin: offset of its first byte in the file."""

    file: OpenFile
    begin: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def read(self) -> NDArray[Any]:
        """Read the whole tensor into a new array. Raises StorageError."""
        array = np.empty(self.shape, self.dtype)
        self.file.read_into(self.begin, array)
        return array

    def read_into(self, out: NDArray[Any], first: int = 0) -> None:
        """Fill an array with the elements from `first` on, in C order. Raises StorageError."""
        begin = self.begin + first * self.dtype.itemsize
        if out.dtype == self.dtype and out.flags.c_contiguous:
            self.file.read_into(begin, out)
        else:
            read = np.empty(out.shape, self.dtype)
            self.file.read_into(begin, read)
            np.copyto(out, read)

    def __getitem__(self, place: slice) -> NDArray[Any]:
        """Read consecutive elements, in C order, into a new array. Raises StorageError."""
        begin, end, step = place.indices(self.size)
        if step != 1:
            raise IndexError(f"a stored tensor can only be read with step 1, got {step}; use 1")
        array = np.empty(max(0, end - begin), self.dtype)
        self.read_into(array, begin)
        return array


class StoredTensors(Mapping[str, NDArray[Any]]):
    """Named arrays in files: each access reads the whole tensor into a new read-only array.

    Raises StorageError if a tensor can't be read. `stored` reads parts of tensors.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = stored

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self.stored[name].read()
        array.flags.writeable = False
        return array

    def __contains__(self, name: object) -> bool:
        return name in self.stored  # `Mapping` would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def forms(
    arrays: Mapping[str, NDArray[Any]],
) -> Mapping[str, NDArray[Any]] | Mapping[str, StoredTensor]:
    """Return objects that have the arrays' types and shapes, without reading a file."""
    return arrays.stored if isinstance(arrays, StoredTensors) else arrays


def picked(
    arrays: Mapping[str, NDArray[Any]], names: Mapping[str, str]
) -> Mapping[str, NDArray[Any]]:
    """Return some of the arrays under new names, without reading a file. names: new name → old
    name."""
    if isinstance(arrays, StoredTensors):
        return StoredTensors({new: arrays.stored[old] for new, old in names.items()})
    return {new: arrays[old] for new, old in names.items()}


def stretch(arrays: Mapping[str, NDArray[Any]], name: str, begin: int, end: int) -> NDArray[Any]:
    """Return elements [begin, end) of an array in C order: a view, or a copy read from its file."""
    if isinstance(arrays, StoredTensors):
        return arrays.stored[name][begin:end]
    return arrays[name].reshape(-1)[begin:end]


def copied(arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """Return a writable copy of an array."""
    if isinstance(arrays, StoredTensors):
        return arrays.stored[name].read()
    return np.array(arrays[name])


def copy_into(out: NDArray[Any], arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Overwrite `out` with the array called `name`, which has the same shape."""
    if isinstance(arrays, StoredTensors):
        arrays.stored[name].read_into(out)
    else:
        np.copyto(out, arrays[name])
