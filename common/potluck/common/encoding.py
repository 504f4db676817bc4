"""How models and updates travel: float32, bfloat16 or int8, as weights or as a difference.

An encoded file is a safetensors file whose layout follows from the model's and the encoding:

- float32: the model's own layout.
- bfloat16: the same with BF16 for F32.
- int8: the whole floating-point vector (`potluck.common.flat`) as one I8 tensor `int8`, and one
  F32 scale for each 128 elements in `int8/scales`. One vector and not one per tensor, so that a
  model of many small tensors has no more overhead than a large one: 1/4 + 1/128 of float32.

Tensors that are not floating-point are carried as they are. Decoding uses single IEEE operations
only (no fused ones, no sums), so every machine reconstructs the same bits.

Stochastic rounding follows QSGD (Alistarh et al. 2017, §3.1) with the maximum norm for each block:
x is sent as ⌊x/s + u⌋ with s = max|x|/127 and u uniform in (0, 1), hence its mean is x. u has 16
bits, which is as fine as float32 itself is near 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.flat import FlatVector, check_float32, name_at, unflatten
from potluck.common.layout import Layout, quoted
from potluck.common.tensors import (
    Tensors,
    block_is_within_bounds,
    first_out_of_bounds,
    not_finite,
    out_of_bounds,
)

INT8_VALUES: Final = "int8"
INT8_SCALES: Final = "int8/scales"
INT8_BLOCK: Final = 128

# A multiple of INT8_BLOCK whose temporaries stay in a core's second-level cache.
_CHUNK: Final = 2**15
_LARGEST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Encoding(StrEnum):
    """How the numbers of a tensor file are encoded; named as in the protocol."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


def encoded_layout(layout: Layout, encoding: Encoding) -> Layout:
    """The layout of a model's encoded file.

    Raises LayoutError if the model has floating-point tensors other than float32, or a tensor
    with a name that int8 files need.
    """
    check_float32(layout)
    if encoding is Encoding.FLOAT32:
        return layout
    if encoding is Encoding.BFLOAT16:
        return Layout.place(
            [(t.name, "BF16" if t.floating else t.dtype, t.shape) for t in layout.tensors]
        )
    carried = [(t.name, t.dtype, t.shape) for t in layout.tensors if not t.floating]
    for name, _, _ in carried:
        if name in (INT8_VALUES, INT8_SCALES):
            raise LayoutError(f"tensor {quoted(name)} has a name that int8 files need; rename it")
    blocks = -(-layout.parameters // INT8_BLOCK)
    return Layout.place(
        [*carried, (INT8_VALUES, "I8", (layout.parameters,)), (INT8_SCALES, "F32", (blocks,))]
    )


def encode(
    arrays: Mapping[str, NDArray[Any]],
    encoding: Encoding,
    *,
    base: Mapping[str, NDArray[Any]] | None = None,
    generator: np.random.Generator | None = None,
) -> dict[str, NDArray[Any]]:
    """The arrays of an encoded file, to be written in `encoded_layout(Layout.of(arrays), …)`.

    `base`: send the difference from these arrays (same names and shapes) instead of weights.
    `generator`: decides the roundings; int8 needs it. Same arrays and same generator state give
    the same bytes. Arrays that need no change are returned themselves. Raises LayoutError as
    `encoded_layout` does, NotFiniteError if int8 would have to carry NaN or infinity.
    """
    layout = Layout.of(arrays)
    check_float32(layout)
    vector = FlatVector(arrays, layout)
    base_vector = None if base is None else FlatVector(base, layout)
    carried = {t.name: arrays[t.name] for t in layout.tensors if not t.floating}
    if encoding is Encoding.INT8:
        if generator is None:
            raise ValueError("int8 is rounded stochastically; pass a generator")
        return {**carried, **_encode_int8(layout, vector, base_vector, generator)}
    if encoding is Encoding.BFLOAT16:
        return unflatten(_encode_bfloat16(vector, base_vector), carried, layout)
    if base_vector is None:
        return dict(arrays)
    difference = np.empty(len(vector), np.float32)
    for begin in range(0, len(vector), _CHUNK):
        _difference(vector, base_vector, begin, difference[begin : begin + _CHUNK])
    return unflatten(difference, carried, layout)


class EncodedUpdate:
    """An encoded tensor file, read as float32 weights block by block.

    `base`: the model that a difference is from; None for a file of whole weights. Reading is
    thread-safe.
    """

    def __init__(
        self,
        file: Tensors,
        model_layout: Layout,
        encoding: Encoding = Encoding.FLOAT32,
        base: Tensors | None = None,
    ) -> None:
        """Raises LayoutError if file or base don't have the layout that belongs to the model."""
        wanted = encoded_layout(model_layout, encoding)
        if file.layout != wanted:
            file.layout.check_matches(wanted)
        if base is not None and base.layout != model_layout:
            base.layout.check_matches(model_layout, what="base")
        self.layout = model_layout
        self._encoding = encoding
        self._arrays = file.arrays
        self._base = None if base is None else FlatVector(base.arrays, model_layout)
        # int8 files hold the vector itself; the others hold it in pieces.
        self._vector = None if encoding is Encoding.INT8 else FlatVector(file.arrays, model_layout)

    @property
    def parameters(self) -> int:
        """Length of the floating-point vector."""
        return self.layout.parameters

    @property
    def carried(self) -> dict[str, NDArray[Any]]:
        """The tensors that are not floating-point, as they are; views of the file."""
        return {t.name: self._arrays[t.name] for t in self.layout.tensors if not t.floating}

    def block(
        self, begin: int, end: int, scratch: NDArray[np.float32]
    ) -> NDArray[np.floating[Any]]:
        """Weights [begin, end) of the floating-point vector, float32; don't change them.

        `scratch`: float32, at least end − begin elements. The answer is a view of the file where
        it holds just these numbers, otherwise the beginning of `scratch`.
        """
        if self._encoding is Encoding.FLOAT32 and self._base is None and self._vector is not None:
            return self._vector.block(begin, end, scratch)
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode weights [begin, end) of the floating-point vector into `out`, of their number."""
        if self._vector is None:
            self._decode_int8(begin, out)
        elif self._encoding is Encoding.BFLOAT16:
            for place, piece in self._vector.pieces(begin, end):
                _decode_bfloat16(piece, out[place])
        else:
            for place, piece in self._vector.pieces(begin, end):
                out[place] = piece
        if self._base is not None:
            for place, piece in self._base.pieces(begin, end):
                np.add(piece, out[place], out=out[place])
        return out

    def decode_to_arrays(self) -> dict[str, NDArray[Any]]:
        """All tensors in the model's layout: new float32 arrays, copies of the others."""
        vector = np.empty(self.parameters, np.float32)
        for begin in range(0, self.parameters, _CHUNK):
            end = min(begin + _CHUNK, self.parameters)
            self.read(begin, end, vector[begin:end])
        carried = {name: array.copy() for name, array in self.carried.items()}
        return unflatten(vector, carried, self.layout)

    def check_numbers(self) -> None:
        """Raise NotFiniteError or OutOfBoundsError naming the first tensor whose decoded weights
        aren't all numbers within bounds."""
        scratch = np.empty(_CHUNK, np.float32)
        for begin in range(0, self.parameters, _CHUNK):
            end = min(begin + _CHUNK, self.parameters)
            with np.errstate(over="ignore", invalid="ignore"):
                block = self.block(begin, end, scratch)
            if not block_is_within_bounds(block):
                place = first_out_of_bounds(block)
                raise out_of_bounds(name_at(self.layout, begin + place), float(block[place]))

    def _decode_int8(self, begin: int, out: NDArray[np.float32]) -> None:
        values, scales = self._arrays[INT8_VALUES], self._arrays[INT8_SCALES]
        np.copyto(out, values[begin : begin + out.size])
        # A block may begin and end inside a scale's 128 elements.
        head = min(-begin % INT8_BLOCK, out.size)
        whole = (out.size - head) // INT8_BLOCK
        tail = head + whole * INT8_BLOCK
        first = (begin + head) // INT8_BLOCK
        if head:
            out[:head] *= scales[begin // INT8_BLOCK]
        body = out[head:tail].reshape(-1, INT8_BLOCK)
        body *= scales[first : first + whole, None]
        if tail < out.size:
            out[tail:] *= scales[first + whole]


def _difference(
    vector: FlatVector, base: FlatVector | None, begin: int, out: NDArray[np.float32]
) -> None:
    """Elements of `vector` from `begin` on, less those of `base`, into all of `out`."""
    end = begin + out.size
    for place, piece in vector.pieces(begin, end):
        out[place] = piece
    if base is not None:
        for place, piece in base.pieces(begin, end):
            out[place] -= piece


def _encode_bfloat16(vector: FlatVector, base: FlatVector | None) -> NDArray[np.uint16]:
    encoded = np.empty(len(vector), np.uint16)
    values = np.empty(_CHUNK, np.float32)
    for begin in range(0, len(vector), _CHUNK):
        out = encoded[begin : begin + _CHUNK]
        _difference(vector, base, begin, values[: out.size])
        bits = values[: out.size].view(np.uint32)
        # Adding just under half of the last place kept, plus that place's bit, rounds to even.
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        # A NaN's payload could carry into the exponent, or be cut to nothing: make it quiet.
        nan = np.isnan(values[: out.size])
        if nan.any():
            rounded[nan] = (bits[nan] >> 16) | 0x40
        np.copyto(out, rounded, casting="unsafe")
    return encoded


def _decode_bfloat16(piece: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, piece)
    bits <<= 16


def _encode_int8(
    layout: Layout, vector: FlatVector, base: FlatVector | None, generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    blocks = -(-len(vector) // INT8_BLOCK)
    values = np.empty(blocks * INT8_BLOCK, np.int8)
    scales = np.empty(blocks, np.float32)
    chunk = np.empty(_CHUNK, np.float32)
    scratch = np.empty(_CHUNK, np.float32)
    for begin in range(0, values.size, _CHUNK):
        end = min(begin + _CHUNK, values.size)
        x, work = chunk[: end - begin], scratch[: end - begin]
        filled = min(end, len(vector)) - begin
        x[filled:] = 0
        with np.errstate(over="ignore", invalid="ignore"):
            _difference(vector, base, begin, x[:filled])
        scale = scales[begin // INT8_BLOCK : end // INT8_BLOCK]
        np.abs(x, out=work)
        np.max(work.reshape(-1, INT8_BLOCK), axis=1, out=scale)
        if not np.isfinite(scale).all():
            raise not_finite(name_at(layout, begin + int(np.argmin(np.isfinite(x)))))
        _scale(x, scale)
        _round_stochastically(x, work, generator)
        np.copyto(values[begin:end], x, casting="unsafe")
    return {INT8_VALUES: values[: len(vector)], INT8_SCALES: scales}


def _scale(x: NDArray[np.float32], scale: NDArray[np.float32]) -> None:
    """Make the largest magnitudes of x's blocks, given in `scale`, their scales; divide by them."""
    scale /= np.float32(127)
    np.minimum(scale, _LARGEST_SCALE, out=scale)
    # Subnormal scales are too coarse to divide by: blocks below 127 · 2⁻¹²⁶ become zero.
    scale[scale < np.finfo(np.float32).tiny] = 0
    inverse = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=inverse, where=scale > 0)
    body = x.reshape(-1, INT8_BLOCK)
    body *= inverse[:, None]


def _round_stochastically(
    x: NDArray[np.float32], work: NDArray[np.float32], generator: np.random.Generator
) -> None:
    """Replace x by ⌊x + u⌋ within ±127; u = (k + ½) / 2¹⁶ with k uniform in [0, 2¹⁶)."""
    words = generator.integers(0, 2**64 - 1, -(-x.size // 4), dtype=np.uint64, endpoint=True)
    np.copyto(work, words.view(np.uint16)[: x.size])
    work += np.float32(0.5)
    work *= np.float32(2**-16)
    x += work
    np.floor(x, out=x)
    # Dividing by a rounded scale may end a last place beyond 127.
    np.clip(x, -127, 127, out=x)
