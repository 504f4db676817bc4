"""Allocates memory for large arrays: in unnamed files, if a folder is set for them.

If memory is short, the kernel writes pages of such a file to disk and drops them. So an array needs
space on the disk and no private memory of the process. All code that creates an array as large as a
part of a model allocates it here. Without a folder, the array is in memory.

These files are mapped, because arrays must be in memory; the files replace swap space. If a page
that was written to disk can't be read again, the process ends with SIGBUS, as with a failing swap
device.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from potluck.common.errors import StorageError
from potluck.common.tensors.holes import reserve

if TYPE_CHECKING:
    import torch

LARGE_BYTES: Final = 2**20
"""Minimum size in bytes of an array in a file; smaller arrays are always in memory."""

_folder: ContextVar[Path | None] = ContextVar("folder_of_large_arrays", default=None)


@contextlib.contextmanager
def large_arrays_in(folder: Path) -> Iterator[None]:
    """Put large arrays that are created in this block into files in `folder`."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array whose values are not set. Raises StorageError if the disk is full."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    folder = _folder.get()
    if folder is None or size < LARGE_BYTES:
        return np.empty(shape, dtype)
    import torch

    memory = torch.empty(0, dtype=torch.uint8).set_(storage_in(folder, size))
    array: NDArray[Any] = memory.numpy().view(dtype).reshape(shape)
    return array


def copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of an array. Raises StorageError if the disk is full."""
    target = empty(array.shape, array.dtype)
    np.copyto(target, array)
    return target


def storage_in(folder: Path, size: int) -> torch.UntypedStorage:
    """Return `size` zero bytes in a file in `folder`. The file is deleted with its last user.

    Raises StorageError if the disk is full. Later writes then always find space.
    """
    import torch

    # Python's own mmap would keep a file descriptor open for each array.
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as file:
            reserve(file.fileno(), size)
            mapped = torch.UntypedStorage.from_file(file.name, True, size)  # shared with the file
    except OSError as error:
        raise StorageError(
            f"can't allocate {size} bytes for a model in {folder}: {error.strerror}",
            path=folder,
            errno=error.errno,
        ) from error
    return cast("torch.UntypedStorage", mapped)
