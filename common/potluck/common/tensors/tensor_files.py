"""Tensor files in safetensors format: read by tensor or by block, and written as a stream.

Reading copies the requested block or tensor from the page cache
(`potluck.common.tensors.stored_tensors`), so an update needs no more memory than this block or
tensor. Writing passes each array's own memory to `write`, and computes the digest at the same time.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from potluck.common.disk import sync_path
from potluck.common.errors import (
    LayoutError,
    NotFiniteError,
    OutOfBoundsError,
    StorageError,
    UpdateError,
)
from potluck.common.interruptible import interruption
from potluck.common.tensors.digest import digest_of_file, hasher
from potluck.common.tensors.holes import write_at
from potluck.common.tensors.layout import (
    DTYPES,
    LENGTH_BYTES,
    Layout,
    TensorSpec,
    parse_header,
    quoted,
)
from potluck.common.tensors.stored_tensors import (
    OpenFile,
    StoredTensor,
    StoredTensors,
    forms,
    picked,
)

__all__ = [
    "LARGEST_VALUE",
    "FileDigest",
    "Layout",
    "NamedTensors",
    "TensorFile",
    "TensorSpec",
    "Tensors",
    "block_is_finite",
    "block_is_within_bounds",
    "check_finite",
    "file_digest",
    "first_out_of_bounds",
    "not_finite",
    "open_tensors",
    "out_of_bounds",
    "write_tensors",
]

MAXIMUM_HEADER_BYTES: Final = 4 * 2**20
LARGEST_VALUE: Final = 2.0**64
"""Exclusive upper bound of the magnitudes in an update.

Squares of larger numbers overflow float32; sums of smaller numbers over any cohort are finite.
"""

_PIECE_BYTES: Final = 2**20
_BLOCK_ELEMENTS: Final = 2**16


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Digest (BLAKE3, 64 lower-case hexadecimal digits) and size (bytes) of a file."""

    blake3: str
    size: int


class Tensors(Protocol):
    """Named arrays and their layout."""

    @property
    def layout(self) -> Layout:
        """Names, types and shapes."""
        ...

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The tensors by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """Named arrays in memory, or a selection of the tensors in files."""

    layout: Layout
    arrays: Mapping[str, NDArray[Any]]

    @classmethod
    def some(cls, tensors: Tensors, layout: Layout) -> NamedTensors:
        """Return the tensors that are in a layout, in its order; no tensor is copied or read."""
        names = {tensor.name: tensor.name for tensor in layout.tensors}
        return cls(layout=layout, arrays=picked(tensors.arrays, names))


class TensorFile:
    """An open tensor file. Its `arrays` are read on access, in the file's order.

    The file must not be changed while it is open. After it is closed, nothing can be read.
    """

    def __init__(self, path: Path, layout: Layout, file: OpenFile, data: int) -> None:
        """data: offset of the first byte after the header."""
        self.path = path
        self.layout = layout
        self._file = file
        self._data = data
        self.arrays = StoredTensors(
            {
                t.name: StoredTensor(file, data + t.begin, DTYPES[t.dtype], t.shape)
                for t in layout.tensors
            }
        )
        """The tensors by name. A bfloat16 tensor appears as its bits in uint16."""

    @property
    def aligned(self) -> bool:
        """True if every tensor begins at a multiple of its elements' size in the file."""
        tensors = self.layout.tensors
        return all((self._data + t.begin) % DTYPES[t.dtype].itemsize == 0 for t in tensors)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tensors(
    path: Path,
    *,
    expected: Layout | None = None,
    maximum_header_bytes: int = MAXIMUM_HEADER_BYTES,
) -> TensorFile:
    """Open a tensor file and read its header.

    expected: names, types and shapes that the file must have. Pass it for every file from another
    machine, because it also limits the header to the size that such a file needs.
    maximum_header_bytes: limit of the header without `expected` (4 MiB describe about 40,000
    tensors). Raises LayoutError if the file is not a tensor file or has other tensors, StorageError
    if it can't be read.
    """
    if expected is not None:
        # Another writer's JSON may have more white space, up to this limit.
        maximum_header_bytes = 2 * len(expected.header) + 4096
    try:
        file = OpenFile(path)
        try:
            size = file.size
            layout = _read_layout(file, size, expected, maximum_header_bytes)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise StorageError(
            f"can't read tensor file {path}: {error.strerror}", path=path, errno=error.errno
        ) from error
    return TensorFile(path, layout, file, size - layout.data_bytes)


def write_tensors(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    layout: Layout | None = None,
    sync: bool = False,
    over: Path | None = None,
    metadata: Mapping[str, str] | None = None,
) -> FileDigest:
    """Write a tensor file under a temporary name, then rename it to `path`.

    layout: layout of the file, by default `Layout.of(arrays)`; needed for bfloat16. sync: True to
    return only when file and name are on disk. over: a spare file in the same file system to
    overwrite. metadata: additional content of the header. Contiguous arrays are not copied. Raises
    LayoutError if an array does not fit the layout, StorageError if the disk fails.
    """
    if layout is None:
        layout = Layout.of(arrays)
    _check_fit(arrays, layout)
    digest, check = hasher(), interruption()
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        temporary = Path(name)
        if over is not None:
            os.close(descriptor)
            over.replace(temporary)
            descriptor = os.open(temporary, os.O_RDWR)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            place = 0
            for piece in _pieces(arrays, layout, layout.header_with(metadata or {})):
                check()
                digest.update(piece)
                write_at(descriptor, piece, place)
                place += len(piece)
            if over is not None:
                file.truncate(place)
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
        temporary = None
        if sync:
            sync_path(path.parent)
    except OSError as error:
        raise StorageError(
            f"can't write tensor file {path} of {layout.file_bytes} bytes: {error.strerror}",
            path=path,
            errno=error.errno,
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return FileDigest(blake3=digest.hexdigest(), size=place)


def file_digest(path: Path) -> FileDigest:
    """Return digest and length of a file. Raises StorageError if it can't be read."""
    try:
        digest, size = digest_of_file(path)
    except OSError as error:
        raise StorageError(
            f"can't read {path}: {error.strerror}", path=path, errno=error.errno
        ) from error
    return FileDigest(blake3=digest, size=size)


def check_finite(file: TensorFile) -> None:
    """Raise NotFiniteError, naming the tensor, if a floating-point tensor contains NaN or
    infinity."""
    for tensor in file.layout.tensors:
        if not tensor.floating:
            continue
        for begin in range(0, tensor.elements, _BLOCK_ELEMENTS):
            block = file.arrays.stored[tensor.name][begin : begin + _BLOCK_ELEMENTS]
            if not _block_is_finite(block, tensor.dtype):
                raise not_finite(tensor.name)


def not_finite(name: str) -> NotFiniteError:
    """Return the error for a tensor that contains NaN or infinity."""
    return NotFiniteError(
        f"tensor {quoted(name)} holds NaN or infinity; lower the learning rate or clip gradients",
        tensor=quoted(name),
    )


def block_is_finite(block: NDArray[np.floating[Any]]) -> bool:
    """Return True if all elements are finite. The result is exact; it is fast if the sum is
    finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A finite sum has no NaN or infinity. If the sum is not finite, look at all elements: large
        # finite numbers may have overflowed.
        return bool(np.isfinite(block.sum()) or np.isfinite(block).all())


def block_is_within_bounds(block: NDArray[np.floating[Any]]) -> bool:
    """Return whether all elements are allowed in an update: finite numbers below `LARGEST_VALUE` in
    magnitude."""
    # If there is a NaN, minimum and maximum are NaN, and both comparisons are False.
    return not block.size or bool(block.min() > -LARGEST_VALUE and block.max() < LARGEST_VALUE)


def out_of_bounds(name: str, value: float) -> UpdateError:
    """Return the error for a tensor with a value that is not allowed in an update."""
    if not math.isfinite(value):
        return not_finite(name)
    return OutOfBoundsError(
        f"tensor {quoted(name)} holds {value:.3g}; an update's numbers must be below "
        f"{LARGEST_VALUE:.3g}: lower the learning rate or clip gradients",
        tensor=quoted(name),
    )


def first_out_of_bounds(block: NDArray[np.floating[Any]]) -> int:
    """Return the position of the first element that is not allowed in an update; there must be
    one."""
    return int(np.argmin(np.abs(block) < LARGEST_VALUE))


def _block_is_finite(block: NDArray[Any], dtype: str) -> bool:
    if dtype == "BF16":
        return not bool((np.bitwise_and(block, 0x7F80) == 0x7F80).any())
    return block_is_finite(block)


def _read_layout(
    file: OpenFile, size: int, expected: Layout | None, maximum_header_bytes: int
) -> Layout:
    prefix = file.read(0, LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise LayoutError(
            f"a tensor file of {size} bytes is too short for its header; send the complete file"
        )
    if length > maximum_header_bytes:
        raise LayoutError(
            f"a tensor file announces a header of {length} bytes, but at most "
            f"{maximum_header_bytes} bytes are accepted"
        )
    text = file.read(LENGTH_BYTES, length)
    if expected is not None and prefix + text == expected.header:
        layout = expected
    else:
        layout = parse_header(text)
        if expected is not None:
            layout.check_matches(expected)
    held = size - LENGTH_BYTES - length
    if held != layout.data_bytes:
        raise LayoutError(
            f"a tensor file contains {held} bytes of data, but its header describes "
            f"{layout.data_bytes} bytes"
        )
    return layout


def _check_fit(arrays: Mapping[str, NDArray[Any]], layout: Layout) -> None:
    if arrays.keys() != layout.by_name.keys():
        missing = sorted(arrays.keys() ^ layout.by_name.keys())
        raise LayoutError(
            f"tensor {quoted(missing[0])} is in the arrays or in the layout, but not in both"
        )
    found = forms(arrays)
    for tensor in layout.tensors:
        array = found[tensor.name]
        if array.shape != tensor.shape or array.dtype != DTYPES[tensor.dtype]:
            raise LayoutError(
                f"tensor {quoted(tensor.name)} is {array.dtype} {array.shape}, but its layout has "
                f"{tensor.dtype} {tensor.shape}",
                tensor=quoted(tensor.name),
            )


def _pieces(
    arrays: Mapping[str, NDArray[Any]], layout: Layout, header: bytes
) -> Iterable[memoryview]:
    yield memoryview(header)
    for tensor in sorted(layout.tensors, key=lambda t: (t.begin, t.end)):
        flat = np.ascontiguousarray(arrays[tensor.name]).reshape(-1).view(np.uint8)
        # A piece is written right after it was hashed, while it is still in the cache.
        for begin in range(0, flat.size, _PIECE_BYTES):
            yield flat[begin : begin + _PIECE_BYTES].data
