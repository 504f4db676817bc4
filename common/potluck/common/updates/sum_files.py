"""Files with sums of updates: writes, checks (the sender is not trusted), and adds them up.

A sum is a safetensors file. For each vector (`body`: the weighted differences; `auxiliary/NAME`: an
auxiliary, sent with the weights) it contains `VECTOR/length`, and `VECTOR/widths` and
`VECTOR/lanes` as `pack` makes them, so that sums can be added even if the model is unknown.
`members` is the digest of the ids of the updates in it (`fixed_point.members_digest`): it binds the
file to the list of its members, and makes files of different clients different.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.interruptible import interruption
from potluck.common.tensors.large_arrays import empty
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import StoredTensor
from potluck.common.tensors.tensor_files import FileDigest, TensorFile, open_tensors, write_tensors
from potluck.common.updates.fixed_point import MEMBERS_BYTES, Words, check_words

# Packing ------------------------------------------------------------------------------------------
# A block of 4,096 words is stored as two's complement, little-endian, with one width for the whole
# block, from 0 bytes (all zero) to 8. The widths are stored separately, so that any block is found
# without reading the blocks before it. Each sequence of words has exactly one valid packed form.

BLOCK_WORDS: Final = 4096
"""Number of words in a block, which share a width."""
MOST_BYTES: Final = 8
"""Maximum width of a word in bytes."""
_WHOLE: Final = (1, 2, 4, 8)
"""Widths in bytes for which processors have integer types."""
_READ_WORDS: Final = 8 * BLOCK_WORDS
"""Number of words per read; they stay in a processor's cache between two passes."""

Bytes = NDArray[np.uint8]
WordReader = Callable[[int, int], Words]
"""Function that returns words [begin, end); begin is a multiple of `BLOCK_WORDS`. The caller may
overwrite the result."""


def blocks_of(words: int) -> int:
    """Return the number of blocks that `words` words need."""
    return -(-words // BLOCK_WORDS)


def width_of(block: Words) -> int:
    """Return the minimum width in bytes that suffices for every word of a block; 0 if all are
    zero."""
    return _width(int(block.min()), int(block.max()))


def widths_of(words: Words) -> list[int]:
    """Return the width of each block; the last block may be shorter."""
    whole = words[: words.size // BLOCK_WORDS * BLOCK_WORDS].reshape(-1, BLOCK_WORDS)
    bounds = zip(whole.min(axis=1).tolist(), whole.max(axis=1).tolist(), strict=True)
    widths = [_width(lowest, highest) for lowest, highest in bounds]
    return widths if whole.size == words.size else [*widths, width_of(words[whole.size :])]


def _width(lowest: int, highest: int) -> int:
    if lowest == highest == 0:
        return 0
    largest = max(highest, -lowest - 1)  # two's complement: −128 needs as many bytes as 127
    return largest.bit_length() // 8 + 1


def pack(read: WordReader, words: int) -> tuple[Bytes, Bytes]:
    """Return each block's width (bytes per value), and the packed blocks one after another."""
    widths = np.zeros(blocks_of(words), np.uint8)
    # Allocate the maximum: pages that are never written use no memory.
    packed = empty((words * MOST_BYTES,), np.uint8)
    end = 0
    for first in range(0, words, _READ_WORDS):
        some = read(first, min(first + _READ_WORDS, words))
        found = widths_of(some)
        widths[first // BLOCK_WORDS :][: len(found)] = found
        for begin, stop, width in _runs(found):
            part = some[begin * BLOCK_WORDS : stop * BLOCK_WORDS]
            size = part.size * width
            if width:
                _narrow(part, width, packed[end : end + size])
            end += size
    return widths, packed[:end]


def _runs(widths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, width) for each group of adjacent blocks with the same width. A group is
    processed in one step."""
    begin = 0
    for width, some in groupby(widths):
        end = begin + sum(1 for _ in some)
        yield begin, end, width
        begin = end


def _narrow(block: Words, width: int, out: Bytes) -> None:
    """Write the lowest `width` bytes of each word."""
    if width in _WHOLE:
        np.copyto(out.view(f"<i{width}"), block, casting="unsafe")
        return
    wide = block.astype("<i8", copy=False).view(np.uint8)
    for place in range(width):  # three times as fast as copying a word's bytes together
        out[place::width] = wide[place::MOST_BYTES]


class PackedWords:
    """Packed words, unpacked as they are read. Thread-safe."""

    def __init__(self, widths: Bytes, packed: Bytes | StoredTensor, words: int) -> None:
        """Raises LayoutError if widths and bytes don't match this number of words."""
        if widths.shape != (blocks_of(words),) or packed.ndim != 1:
            raise LayoutError(
                f"a vector of {words} words has {widths.size} widths, but needs {blocks_of(words)}"
            )
        if widths.size and int(widths.max()) > MOST_BYTES:
            raise LayoutError(
                f"words are {int(widths.max())} bytes wide; the maximum is {MOST_BYTES}"
            )
        sizes = np.full(widths.size, BLOCK_WORDS, np.int64)
        if widths.size:
            sizes[-1] = words - (widths.size - 1) * BLOCK_WORDS
        ends = np.cumsum(sizes * widths)
        if (int(ends[-1]) if ends.size else 0) != packed.size:
            raise LayoutError(
                f"packed words have {packed.size} bytes, but their widths add up to "
                f"{int(ends[-1]) if ends.size else 0}"
            )
        self.words = words
        self._widths: list[int] = widths.tolist()
        self._begins: list[int] = [0, *ends.tolist()]
        self._packed = packed

    def read(self, begin: int, end: int) -> Words:
        """Return a copy of words [begin, end); begin is a multiple of `BLOCK_WORDS`."""
        words = np.empty(end - begin, np.int64)
        first = begin // BLOCK_WORDS
        last = first + blocks_of(words.size)
        offset = self._begins[first]
        packed = self._packed[offset : self._begins[last]]
        for start, stop, width in _runs(self._widths[first:last]):
            some = words[start * BLOCK_WORDS : stop * BLOCK_WORDS]
            place = self._begins[first + start] - offset
            _widen(packed[place : place + some.size * width], width, some)
        return words

    def check(self, members: int) -> None:
        """Read and check all words.

        Raises LayoutError if a block is wider than necessary, OutOfBoundsError if a sum over
        `members` clients can't have such words.
        """
        check = interruption()
        for begin in range(0, self.words, _READ_WORDS):
            check()
            words = self.read(begin, min(begin + _READ_WORDS, self.words))
            check_words(words, members)
            first = begin // BLOCK_WORDS
            widths = self._widths[first : first + blocks_of(words.size)]
            for width, needed in zip(widths, widths_of(words), strict=True):
                if width != needed:
                    raise LayoutError(
                        f"a block of words is {width} bytes wide, but needs only {needed}; use the "
                        "minimum width"
                    )


def _widen(narrow: Bytes, width: int, out: Words) -> None:
    """Unpack bytes into words. out: array of at least one word."""
    if width == 0:
        out.fill(0)
        return
    if width in _WHOLE:
        np.copyto(out, narrow.view(f"<i{width}"))
        return
    # Read each word as a wider integer that ends at the word's end, and begins in the word before.
    # The word is in the integer's upper bytes, so a shift gives its value with the sign. The first
    # word is read separately, since no bytes precede it.
    out[0] = int.from_bytes(narrow[:width].tobytes(), "little", signed=True)
    size = 4 if width < 4 else MOST_BYTES
    wider: NDArray[np.signedinteger[Any]] = np.ndarray(
        out.size - 1, f"<i{size}", narrow, offset=2 * width - size, strides=(width,)
    )
    np.right_shift(wider, 8 * (size - width), out=out[1:])


def add(readers: list[WordReader]) -> WordReader:
    """Return a reader that adds up the words of one or more readers."""

    def total(begin: int, end: int) -> Words:
        words = readers[0](begin, end)
        for read in readers[1:]:
            np.add(words, read(begin, end), out=words)
        return words

    return total


# Files --------------------------------------------------------------------------------------------

BODY: Final = "body"
AUXILIARY: Final = "auxiliary/"
"""Prefix of the name of an auxiliary's vector."""
MEMBERS: Final = "members"
_LENGTH: Final = "/length"
_WIDTHS: Final = "/widths"
_WORDS: Final = "/lanes"  # the format keeps this older name
_HEADER_BYTES: Final = 1 << 16


def vectors_of(parameters: int, auxiliaries: Iterable[str]) -> Mapping[str, int]:
    """Return the name and length of each vector of an update. parameters: length of the
    floating-point vector."""
    beside = {f"{AUXILIARY}{name}": parameters for name in sorted(auxiliaries)}
    return {BODY: parameters, **beside}


def write_sum_file(
    path: Path,
    readers: Mapping[str, WordReader],
    vectors: Mapping[str, int],
    members: bytes,
    *,
    over: Path | None = None,
) -> FileDigest:
    """Write a sum to a file. Blocks the calling thread.

    readers: one for each vector. members: digest of the ids of the sum's updates. over: a spare
    file to overwrite. Raises the errors of the readers, and StorageError.
    """
    arrays: dict[str, NDArray[Any]] = {MEMBERS: np.frombuffer(members, np.uint8)}
    for name, length in vectors.items():
        arrays[name + _LENGTH] = np.array([length], np.uint64)
        arrays[name + _WIDTHS], arrays[name + _WORDS] = pack(readers[name], length)
    return write_tensors(path, arrays, layout=Layout.of(arrays), over=over)


class SumFile:
    """An open file that contains a sum of updates."""

    def __init__(self, file: TensorFile) -> None:
        """Raises LayoutError if the file does not have the tensors of a sum."""
        names = _vector_names(file.layout)
        arrays = file.arrays
        self.members: bytes = arrays[MEMBERS].tobytes()
        self.vectors: Mapping[str, int] = {name: int(arrays[name + _LENGTH][0]) for name in names}
        """Length of each vector, as stated in the file."""
        self._packed = {
            name: PackedWords(arrays[name + _WIDTHS], arrays.stored[name + _WORDS], length)
            for name, length in self.vectors.items()
        }

    def reader(self, vector: str) -> WordReader:
        """Return a reader of a vector's words. Thread-safe."""
        return self._packed[vector].read

    def check(self, members: bytes, count: int) -> None:
        """Check the whole file. Blocks the calling thread.

        members: digest of the updates that the file should contain. count: number of these updates.

        Raises LayoutError if the members differ or the words are not packed as specified,
        OutOfBoundsError for words that a sum over `count` members can't have.
        """
        if self.members != members:
            raise LayoutError(
                "a sum's file contains other updates than announced; send the announced file"
            )
        for packed in self._packed.values():
            packed.check(count)


@contextmanager
def opened_sum_file(path: Path, vectors: Mapping[str, int] | None = None) -> Iterator[SumFile]:
    """Open a sum's file while the block runs.

    vectors: lengths of the vectors that the file must have; None to accept any. Raises LayoutError,
    StorageError.
    """
    with open_tensors(path, maximum_header_bytes=_HEADER_BYTES) as file:
        total = SumFile(file)
        if vectors is not None and total.vectors != vectors:
            raise LayoutError(
                f"a sum's file has the vectors {_described(total.vectors)}, but the run's model "
                f"needs {_described(vectors)}"
            )
        yield total


def add_files(path: Path, parts: Sequence[Path], members: bytes) -> FileDigest:
    """Add up the sums in one or more files and write the result. Blocks the calling thread.

    members: digest of all updates in the result. Raises LayoutError if the files have different
    vectors, StorageError.
    """
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(opened_sum_file(parts[0]))
        vectors = first.vectors
        files = [
            first,
            *(stack.enter_context(opened_sum_file(part, vectors)) for part in parts[1:]),
        ]
        readers = {name: add([file.reader(name) for file in files]) for name in vectors}
        return write_sum_file(path, readers, vectors, members)


def _vector_names(layout: Layout) -> list[str]:
    """Return the names of a file's vectors. Raises LayoutError if the file contains anything
    else."""
    names = [t.name[: -len(_LENGTH)] for t in layout.tensors if t.name.endswith(_LENGTH)]
    wanted = {MEMBERS: ("U8", MEMBERS_BYTES)}
    for name in names:
        wanted |= {
            name + _LENGTH: ("U64", 1),
            name + _WIDTHS: ("U8", -1),
            name + _WORDS: ("U8", -1),
        }
    for name in sorted(wanted.keys() ^ layout.by_name.keys()):
        fault = "lacks" if name in wanted else "has the unexpected"
        raise LayoutError(f"a sum's file {fault} tensor {quoted(name)}", tensor=quoted(name))
    for tensor in layout.tensors:
        dtype, elements = wanted[tensor.name]
        row = tensor.dtype == dtype and len(tensor.shape) == 1
        if not row or elements not in (-1, tensor.elements):
            raise LayoutError(
                f"tensor {quoted(tensor.name)} of a sum's file is {tensor.dtype} of shape "
                f"{tensor.shape}; it must be a row of {dtype}",
                tensor=quoted(tensor.name),
            )
    return names


def _described(vectors: Mapping[str, int]) -> str:
    return ", ".join(f"{quoted(name)} of {length}" for name, length in sorted(vectors.items()))
