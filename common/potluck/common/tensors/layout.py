"""Layout of a safetensors file: its tensors and their places, as written in its header.

A safetensors file is eight bytes of length (unsigned, little-endian), a JSON object of that length,
and the tensors' bytes (https://github.com/huggingface/safetensors, README, "Format"). The library
of the format copies every tensor that it reads for numpy, and assembles in memory every file that
it writes. So reading and writing are implemented here. A header may come from an untrusted peer:
everything in it is checked, and `parse_header` raises only LayoutError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.tensors.stored_tensors import forms

LENGTH_BYTES: Final = 8
ALIGNMENT: Final = 8
MAXIMUM_DIMENSIONS: Final = 32
_MAXIMUM_BYTES: Final = 2**63 - 1
# For the limits below: a tensor opens three brackets and needs at least 49 characters; names may
# contain brackets, too.
_CHARACTERS_PER_BRACKET: Final = 12

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""numpy type for each type of the format. numpy has no bfloat16, so a BF16 tensor appears as its
bits in uint16."""

FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor: bytes [begin, end) of the file's data, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """True if the tensor takes part in arithmetic; other tensors are passed on unchanged."""
        return self.dtype in FLOATING


@dataclass(frozen=True)
class Layout:
    """The tensors of a file, in the order in which all code processes them."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Layout:
        """Return the canonical layout of named arrays, in their order.

        Raises LayoutError for an array type that the format does not have.
        """
        return cls.place(
            [(name, _dtype_name(name, a.dtype), a.shape) for name, a in forms(arrays).items()]
        )

    @classmethod
    def place(cls, tensors: list[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Return the canonical layout of tensors given as (name, dtype, shape).

        Tensors of wider types come first in the data, so that every tensor is aligned.
        """
        sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in tensors]
        begins = [0] * len(tensors)
        position = 0
        for index in sorted(range(len(tensors)), key=lambda i: -DTYPES[tensors[i][1]].itemsize):
            begins[index] = position
            position += sizes[index]
        return cls(
            tuple(
                TensorSpec(name=name, dtype=dtype, shape=shape, begin=begin, end=begin + size)
                for (name, dtype, shape), begin, size in zip(tensors, begins, sizes, strict=True)
            )
        )

    def without(self, patterns: Sequence[str]) -> Layout:
        """Return the canonical layout without the tensors whose names match a pattern, such as
        '*.base_layer.weight'.

        Without patterns, return this layout itself.
        """
        if not patterns:
            return self
        return self.without_names(
            [t.name for t in self.tensors if any(fnmatchcase(t.name, each) for each in patterns)]
        )

    def without_names(self, names: Collection[str]) -> Layout:
        """Return the canonical layout without these tensors."""
        others = set(names)
        return Layout.place(
            [(t.name, t.dtype, t.shape) for t in self.tensors if t.name not in others]
        )

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def data_bytes(self) -> int:
        """Length of the data after the header."""
        return max((tensor.end for tensor in self.tensors), default=0)

    @cached_property
    def header(self) -> bytes:
        """The length and the JSON at the beginning of a file; the same for equal layouts."""
        return self.header_with({})

    def header_with(self, metadata: Mapping[str, str]) -> bytes:
        """Return the header with `metadata` as its `__metadata__`, for other programs.

        If `metadata` is empty, return the plain header.
        """
        described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        described |= {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.begin, tensor.end],
            }
            for tensor in self.tensors
        }
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + self.data_bytes

    @cached_property
    def parameters(self) -> int:
        """Number of floating-point elements."""
        return sum(tensor.elements for tensor in self.tensors if tensor.floating)

    def check_matches(
        self, expected: Layout, *, what: str = "update", whose: str = "model"
    ) -> None:
        """Raise LayoutError unless names, types and shapes are those of `expected`.

        Order and places of the tensors don't matter: tensors are always found by name. what, whose:
        words for the message.
        """
        for wanted in expected.tensors:
            found = self.by_name.get(wanted.name)
            if found is None:
                _refuse(
                    f"the {what} lacks tensor {quoted(wanted.name)} of the {whose}", wanted.name
                )
            if found.shape != wanted.shape:
                _refuse(
                    f"{what} tensor {quoted(found.name)} has shape {_shape(found.shape)}, but "
                    f"the {whose}'s tensor has shape {_shape(wanted.shape)}",
                    found.name,
                )
            if found.dtype != wanted.dtype:
                _refuse(
                    f"{what} tensor {quoted(found.name)} has type {found.dtype}, but the "
                    f"{whose}'s tensor has type {wanted.dtype}",
                    found.name,
                )
        for found in self.tensors:
            if found.name not in expected.by_name:
                _refuse(f"{what} tensor {quoted(found.name)} is not in the {whose}", found.name)


def parse_header(text: bytes) -> Layout:
    """Return the layout that a header's JSON describes. Raises LayoutError and no other error."""
    if not text.startswith(b"{"):
        _refuse("a tensor file's header must begin with '{'; this is not a safetensors file")
    if text.count(b"[") + text.count(b"{") > 8 + len(text) // _CHARACTERS_PER_BRACKET:
        # An invalid header could cost Python seconds and 20 times its size in memory.
        _refuse("a tensor file's header has more brackets than a header of this length can need")
    try:
        described: object = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        # ValueError also covers UnicodeDecodeError and numbers of thousands of digits.
        raise LayoutError(
            f"a tensor file's header is not JSON ({type(error).__name__}); send a safetensors file"
        ) from error
    if not isinstance(described, dict):
        _refuse("a tensor file's header must be one JSON object")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        _refuse("a tensor file's __metadata__ must map strings to strings")
    layout = Layout(tuple(_parse_tensor(name, value) for name, value in described.items()))
    _check_tiling(layout)
    return layout


def quoted(name: str) -> str:
    """Return a tensor's name in quotes, shortened and escaped for one line of an error message."""
    return repr(name if len(name) <= 120 else name[:120] + "…")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a tensor file's header contains a name twice; all names must differ")
    return found


def _parse_tensor(name: str, described: object) -> TensorSpec:
    label = quoted(name)
    if not name.isprintable():
        # Such names can't be shown. This also refuses lone surrogates, which can't be encoded.
        _refuse(f"tensor name {label} contains characters that can't be printed", name)
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"tensor {label} must be described by dtype, shape and data_offsets only", name)
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(f"tensor {label} has a dtype other than {', '.join(DTYPES)}", name)
    if not _is_sizes(shape) or len(shape) > MAXIMUM_DIMENSIONS:
        _refuse(f"tensor {label} must have a shape of at most {MAXIMUM_DIMENSIONS} sizes ≥ 0", name)
    if not _is_sizes(offsets) or len(offsets) != 2:
        _refuse(f"tensor {label} must have two data_offsets ≥ 0", name)
    size = math.prod(shape) * DTYPES[dtype].itemsize
    # numpy multiplies all sizes other than 0, even for an empty tensor: that product must not
    # overflow.
    if math.prod(filter(None, shape)) * DTYPES[dtype].itemsize > _MAXIMUM_BYTES:
        _refuse(f"tensor {label} is larger than any file can be", name)
    begin, end = offsets
    if end - begin != size:
        _refuse(
            f"tensor {label} needs {size} bytes, but its data_offsets span {end - begin} bytes",
            name,
        )
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _is_sizes(value: object) -> bool:
    if not isinstance(value, list):
        return False
    # Compare types: bool is a subclass of int, but `true` is not a size.
    return all(type(size) is int and 0 <= size <= _MAXIMUM_BYTES for size in value)


def _check_tiling(layout: Layout) -> None:
    position = 0
    for tensor in sorted(layout.tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            fault = (
                "is preceded by unused bytes"
                if tensor.begin > position
                else "overlaps another tensor"
            )
            _refuse(f"tensor {quoted(tensor.name)} {fault}", tensor.name)
        position = tensor.end


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    found = _NAMES.get(dtype)
    if found is None:
        _refuse(f"tensor {quoted(name)} has type {dtype}, which safetensors files can't hold", name)
    return found


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "() (a scalar)"


def _refuse(message: str, name: str | None = None) -> NoReturn:
    raise LayoutError(message, **({} if name is None else {"tensor": quoted(name)}))
