"""Files with sums of lanes: writes them, checks them (the sender is not trusted), and adds them up.

A sum is a safetensors file. For each vector (`body`: the weighted differences; `auxiliary/NAME`: an
auxiliary, sent with the weights) it contains `VECTOR/length`, and `VECTOR/widths` and
`VECTOR/lanes` as in `lane_packing`, so that sums can be added even if the model is unknown.
`members` is the digest of the ids of the updates in it (`lanes.members_digest`): it binds the file
to the list of its members, and makes files of different clients different.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.tensor_files import FileDigest, TensorFile, open_tensors, write_tensors
from potluck.common.updates.lane_packing import (
    MOST_BYTES,
    LaneReader,
    PackedLanes,
    add,
    blocks_of,
    pack,
)
from potluck.common.updates.lanes import MEMBERS_BYTES

BODY: Final = "body"
AUXILIARY: Final = "auxiliary/"
"""Prefix of the name of an auxiliary's vector."""
MEMBERS: Final = "members"
_LENGTH: Final = "/length"
_WIDTHS: Final = "/widths"
_LANES: Final = "/lanes"
_HEADER_BYTES: Final = 1 << 16


def vectors_of(parameters: int, auxiliaries: Iterable[str]) -> Mapping[str, int]:
    """Return the name and length of each vector of an update. parameters: length of the
    floating-point vector."""
    beside = {f"{AUXILIARY}{name}": parameters for name in sorted(auxiliaries)}
    return {BODY: parameters, **beside}


def largest_file(vectors: Mapping[str, int]) -> int:
    """Return the maximum size in bytes of a file with these vectors."""
    return _HEADER_BYTES + sum(
        MOST_BYTES * length + blocks_of(length) for length in vectors.values()
    )


def write_lanes(
    path: Path,
    readers: Mapping[str, LaneReader],
    vectors: Mapping[str, int],
    members: bytes,
    *,
    over: Path | None = None,
) -> FileDigest:
    """Write a sum to a file. Blocks.

    readers: one for each vector. members: digest of the ids of the sum's updates. over: a spare
    file to overwrite. Raises the errors of the readers, and StorageError.
    """
    arrays: dict[str, NDArray[Any]] = {MEMBERS: np.frombuffer(members, np.uint8)}
    for name, length in vectors.items():
        arrays[name + _LENGTH] = np.array([length], np.uint64)
        arrays[name + _WIDTHS], arrays[name + _LANES] = pack(readers[name], length)
    return write_tensors(path, arrays, layout=Layout.of(arrays), over=over)


class LaneFile:
    """An open file of a sum."""

    def __init__(self, file: TensorFile) -> None:
        """Raises LayoutError if the file does not have the tensors of a sum."""
        names = _vector_names(file.layout)
        arrays = file.arrays
        self.members: bytes = arrays[MEMBERS].tobytes()
        self.vectors: Mapping[str, int] = {name: int(arrays[name + _LENGTH][0]) for name in names}
        """Length of each vector, as stated in the file."""
        self._packed = {
            name: PackedLanes(arrays[name + _WIDTHS], arrays.stored[name + _LANES], length)
            for name, length in self.vectors.items()
        }

    def reader(self, vector: str) -> LaneReader:
        """Return a reader of a vector's lanes. Thread-safe."""
        return self._packed[vector].read

    def check(self, members: bytes, count: int) -> None:
        """Check the whole file. Blocks.

        members: digest of the updates that the file should contain. count: number of these updates.

        Raises LayoutError if the members differ or the lanes are not packed as specified,
        OutOfBoundsError for lanes that a sum over `count` members can't have.
        """
        if self.members != members:
            raise LayoutError(
                "a sum's file contains other updates than announced; send the announced file"
            )
        for packed in self._packed.values():
            packed.check(count)


@contextmanager
def opened_lanes(path: Path, vectors: Mapping[str, int] | None = None) -> Iterator[LaneFile]:
    """Open a sum's file while the block runs.

    vectors: lengths of the vectors that the file must have; None to accept any. Raises LayoutError,
    StorageError.
    """
    with open_tensors(path, maximum_header_bytes=_HEADER_BYTES) as file:
        lanes = LaneFile(file)
        if vectors is not None and lanes.vectors != vectors:
            raise LayoutError(
                f"a sum's file has {_described(lanes.vectors)}, but the run's model needs "
                f"{_described(vectors)}"
            )
        yield lanes


def add_files(path: Path, parts: Sequence[Path], members: bytes) -> FileDigest:
    """Add up the sums in one or more files and write the result. Blocks.

    members: digest of all updates in the result. Raises LayoutError if the files have different
    vectors, StorageError.
    """
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(opened_lanes(parts[0]))
        vectors = first.vectors
        files = [first, *(stack.enter_context(opened_lanes(part, vectors)) for part in parts[1:])]
        readers = {name: add([file.reader(name) for file in files]) for name in vectors}
        return write_lanes(path, readers, vectors, members)


def _vector_names(layout: Layout) -> list[str]:
    """Return the names of a file's vectors. Raises LayoutError if the file contains anything
    else."""
    names = [t.name[: -len(_LENGTH)] for t in layout.tensors if t.name.endswith(_LENGTH)]
    wanted = {MEMBERS: ("U8", MEMBERS_BYTES)}
    for name in names:
        wanted |= {
            name + _LENGTH: ("U64", 1),
            name + _WIDTHS: ("U8", -1),
            name + _LANES: ("U8", -1),
        }
    for name in sorted(wanted.keys() ^ layout.by_name.keys()):
        fault = "lacks" if name in wanted else "has"
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
