"""Encodings of models and updates: float32, bfloat16 or int8, as weights or as a difference.

An encoded file is a safetensors file whose layout follows from the model's and the encoding:

- float32: the model's own layout.
- bfloat16: the model's layout, with BF16 for F32.
- int8: the whole floating-point vector (`potluck.common.tensors.flat`) as one I8 tensor `int8`, and
  one F32 scale for each 128 elements in `int8/scales`. There is one vector, not one per tensor, so
  that many small tensors have no more overhead than one large tensor: 1/4 + 1/128 of float32.

Tensors that are not floating-point are stored unchanged. Decoding uses only single IEEE operations
(no fused operations, no sums), so every machine reconstructs the same bits.

Stochastic rounding follows QSGD (Alistarh et al. 2017, §3.1) with the maximum norm for each block:
x is sent as ⌊x/s + u⌋ with s = max|x|/127 and u uniform in (0, 1), so the expected decoded value is
x. u has 16 bits, which is the resolution of float32 near 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import LayoutError
from potluck.common.interruptible import interruption
from potluck.common.tensors.flat import FlatVector, check_float32, name_at, unflatten
from potluck.common.tensors.layout import Layout, quoted
from potluck.common.tensors.stored_tensors import stretch
from potluck.common.tensors.tensor_drafts import TensorDraft
from potluck.common.tensors.tensor_files import (
    Tensors,
    block_is_within_bounds,
    first_out_of_bounds,
    not_finite,
    out_of_bounds,
)

INT8_VALUES: Final = "int8"
INT8_SCALES: Final = "int8/scales"
INT8_BLOCK: Final = 128
VECTOR: Final = ""
"""Name that stands for the whole floating-point vector, in place of a tensor's name."""

# A multiple of INT8_BLOCK. Temporary arrays of this length stay in a core's second-level cache.
_CHUNK: Final = 2**15
_LARGEST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


_Block = tuple[str, int, NDArray[Any]]


class Encoding(StrEnum):
    """Encoding of the numbers in a tensor file. The names are also the protocol's names."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


def encoded_layout(layout: Layout, encoding: Encoding) -> Layout:
    """Return the layout of a model's encoded file.

    Raises LayoutError if the model has floating-point tensors other than float32, or a tensor with
    a name that int8 files need.
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
            raise LayoutError(
                f"tensor {quoted(name)} has a name that is reserved for int8 files; rename it"
            )
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
    """Return the arrays of an encoded file, to be written in `encoded_layout(Layout.of(arrays),
    …)`.

    base: arrays (same names and shapes) whose difference from `arrays` is sent instead of weights;
    None to send weights. generator: source of the random rounding; int8 needs it. Same arrays and
    same generator state give the same bytes. Arrays that need no conversion are returned without a
    copy. Raises the errors of `encoded_layout`, and NotFiniteError if an array for int8 contains
    NaN or infinity.
    """
    layout = Layout.of(arrays)
    check_float32(layout)
    if encoding is Encoding.FLOAT32 and base is None:
        return dict(arrays)
    carried = {t.name: arrays[t.name] for t in layout.tensors if not t.floating}
    encoded: dict[str, NDArray[Any]]
    match encoding:
        case Encoding.INT8:
            scales = np.empty(-(-layout.parameters // INT8_BLOCK), np.float32)
            encoded = {INT8_VALUES: np.empty(layout.parameters, np.int8), INT8_SCALES: scales}
        case Encoding.BFLOAT16:
            encoded = {VECTOR: np.empty(layout.parameters, np.uint16)}
        case Encoding.FLOAT32:
            encoded = {VECTOR: np.empty(layout.parameters, np.float32)}
    for name, begin, block in encoded_blocks(arrays, encoding, base=base, generator=generator):
        encoded[name][begin : begin + block.size] = block
    if encoding is Encoding.INT8:
        return {**carried, **encoded}
    return unflatten(encoded[VECTOR], carried, layout)


def encoded_blocks(
    arrays: Mapping[str, NDArray[Any]],
    encoding: Encoding,
    *,
    base: Mapping[str, NDArray[Any]] | None = None,
    generator: np.random.Generator | None = None,
) -> Iterator[_Block]:
    """Yield the floating-point part of `encode`'s result in blocks.

    A block is (name of the tensor, index of the first element, numbers). The name is `VECTOR` for
    the floating-point vector. The next block overwrites the numbers. Raises the errors of `encode`.
    """
    layout = Layout.of(arrays)
    check_float32(layout)
    vector = FlatVector(arrays, layout)
    base_vector = None if base is None else FlatVector(base, layout)
    check = interruption()
    if encoding is Encoding.INT8:
        if generator is None:
            raise ValueError("int8 is rounded stochastically; pass a generator")
        blocks = _int8_blocks(layout, vector, base_vector, generator)
    elif encoding is Encoding.BFLOAT16:
        blocks = _bfloat16_blocks(vector, base_vector)
    else:
        blocks = _float32_blocks(vector, base_vector)
    for block in blocks:
        check()
        yield block


def write_encoded(
    draft: TensorDraft,
    arrays: Mapping[str, NDArray[Any]],
    encoding: Encoding,
    *,
    base: Mapping[str, NDArray[Any]] | None = None,
    generator: np.random.Generator | None = None,
) -> None:
    """Encode block by block into a draft. Raises the errors of `encode`, and StorageError."""
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            draft.put(name, 0, array)
    for name, begin, block in encoded_blocks(arrays, encoding, base=base, generator=generator):
        if name == VECTOR:
            draft.put_flat(begin, block)
        else:
            draft.put(name, begin, block)


class EncodedUpdate:
    """An encoded tensor file, read as float32 weights block by block.

    base: the model that was subtracted before encoding; None if the file contains weights. Reading
    is thread-safe.
    """

    def __init__(
        self,
        file: Tensors,
        model_layout: Layout,
        encoding: Encoding = Encoding.FLOAT32,
        base: Tensors | None = None,
    ) -> None:
        """Raises LayoutError if the layout of `file` or `base` does not fit the model."""
        wanted = encoded_layout(model_layout, encoding)
        if file.layout != wanted:
            file.layout.check_matches(wanted)
        if base is not None and base.layout != model_layout:
            base.layout.check_matches(model_layout, what="base")
        self.layout = model_layout
        self._encoding = encoding
        self._arrays = file.arrays
        self._base = None if base is None else FlatVector(base.arrays, model_layout)
        # int8 files contain the whole vector; other files contain it as separate tensors.
        self._vector = None if encoding is Encoding.INT8 else FlatVector(file.arrays, model_layout)

    @property
    def parameters(self) -> int:
        """Length of the floating-point vector."""
        return self.layout.parameters

    @property
    def carried(self) -> dict[str, NDArray[Any]]:
        """The tensors that are not floating-point, unchanged."""
        return {t.name: self._arrays[t.name] for t in self.layout.tensors if not t.floating}

    def block(
        self, begin: int, end: int, scratch: NDArray[np.float32]
    ) -> NDArray[np.floating[Any]]:
        """Return weights [begin, end) of the floating-point vector, float32; don't change them.

        scratch: float32, at least end − begin elements. Returns a view if one array in memory has
        these numbers, otherwise the beginning of `scratch`.
        """
        if self._encoding is Encoding.FLOAT32 and self._base is None and self._vector is not None:
            return self._vector.block(begin, end, scratch)
        return self.read(begin, end, scratch[: end - begin])

    def read(self, begin: int, end: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode weights [begin, end) of the floating-point vector into `out`, which has end −
        begin elements."""
        if self._vector is None:
            self._decode_int8(begin, out)
        elif self._encoding is Encoding.BFLOAT16:
            _decode_bfloat16(self._vector.block(begin, end), out)
        else:
            self._vector.read(begin, end, out)
        if self._base is not None:
            np.add(self._base.block(begin, end), out, out=out)
        return out

    def decode_to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all tensors in the model's layout: new float32 arrays for the decoded ones, copies
        of the other tensors."""
        vector = np.empty(self.parameters, np.float32)
        for begin in range(0, self.parameters, _CHUNK):
            end = min(begin + _CHUNK, self.parameters)
            self.read(begin, end, vector[begin:end])
        carried = {name: array.copy() for name, array in self.carried.items()}
        return unflatten(vector, carried, self.layout)

    def decode_to(self, draft: TensorDraft) -> None:
        """Decode all tensors, block by block, into a draft in the model's layout. Raises
        StorageError."""
        scratch, check = np.empty(_CHUNK, np.float32), interruption()
        for name, array in self.carried.items():
            draft.put(name, 0, array)
        for begin in range(0, self.parameters, _CHUNK):
            check()
            end = min(begin + _CHUNK, self.parameters)
            draft.put_flat(begin, self.block(begin, end, scratch))

    def check_numbers(self) -> None:
        """Raise NotFiniteError or OutOfBoundsError if a decoded weight is not a finite number
        within bounds.

        The error names the first such tensor.
        """
        scratch = np.empty(_CHUNK, np.float32)
        for begin in range(0, self.parameters, _CHUNK):
            end = min(begin + _CHUNK, self.parameters)
            with np.errstate(over="ignore", invalid="ignore"):
                block = self.block(begin, end, scratch)
            if not block_is_within_bounds(block):
                place = first_out_of_bounds(block)
                raise out_of_bounds(name_at(self.layout, begin + place), float(block[place]))

    def _decode_int8(self, begin: int, out: NDArray[np.float32]) -> None:
        np.copyto(out, stretch(self._arrays, INT8_VALUES, begin, begin + out.size))
        # A block may begin and end inside a scale's 128 elements.
        head = min(-begin % INT8_BLOCK, out.size)
        whole = (out.size - head) // INT8_BLOCK
        tail = head + whole * INT8_BLOCK
        before = begin // INT8_BLOCK
        first = (begin + head) // INT8_BLOCK - before
        scales = stretch(self._arrays, INT8_SCALES, before, before + first + whole + 1)
        if head:
            out[:head] *= scales[0]
        body = out[head:tail].reshape(-1, INT8_BLOCK)
        body *= scales[first : first + whole, None]
        if tail < out.size:
            out[tail:] *= scales[first + whole]


def _difference(
    vector: FlatVector, base: FlatVector | None, begin: int, out: NDArray[np.float32]
) -> None:
    """Fill `out` with the elements of `vector` from `begin` on, minus those of `base`."""
    end = begin + out.size
    vector.read(begin, end, out)
    if base is not None:
        out -= base.block(begin, end)


def _float32_blocks(vector: FlatVector, base: FlatVector | None) -> Iterator[_Block]:
    values = np.empty(_CHUNK, np.float32)
    for begin in range(0, len(vector), _CHUNK):
        out = values[: len(vector) - begin]
        _difference(vector, base, begin, out)
        yield VECTOR, begin, out


def _bfloat16_blocks(vector: FlatVector, base: FlatVector | None) -> Iterator[_Block]:
    encoded, values = np.empty(_CHUNK, np.uint16), np.empty(_CHUNK, np.float32)
    for begin in range(0, len(vector), _CHUNK):
        out = encoded[: len(vector) - begin]
        _difference(vector, base, begin, values[: out.size])
        bits = values[: out.size].view(np.uint32)
        # Round to the nearest, ties to even: add just under half a unit of the last kept bit, plus
        # this bit.
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        # Rounding could carry a NaN's payload into the exponent, or clear it: make the NaN quiet.
        nan = np.isnan(values[: out.size])
        if nan.any():
            rounded[nan] = (bits[nan] >> 16) | 0x40
        np.copyto(out, rounded, casting="unsafe")
        yield VECTOR, begin, out


def _decode_bfloat16(piece: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, piece)
    bits <<= 16


def _int8_blocks(
    layout: Layout, vector: FlatVector, base: FlatVector | None, generator: np.random.Generator
) -> Iterator[_Block]:
    values, scales = np.empty(_CHUNK, np.int8), np.empty(_CHUNK // INT8_BLOCK, np.float32)
    chunk, scratch = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.float32)
    padded = -(-len(vector) // INT8_BLOCK) * INT8_BLOCK
    for begin in range(0, padded, _CHUNK):
        size = min(_CHUNK, padded - begin)
        x, work, scale = chunk[:size], scratch[:size], scales[: size // INT8_BLOCK]
        filled = min(size, len(vector) - begin)
        x[filled:] = 0
        with np.errstate(over="ignore", invalid="ignore"):
            _difference(vector, base, begin, x[:filled])
        np.abs(x, out=work)
        np.max(work.reshape(-1, INT8_BLOCK), axis=1, out=scale)
        if not np.isfinite(scale).all():
            raise not_finite(name_at(layout, begin + int(np.argmin(np.isfinite(x)))))
        _scale(x, scale)
        _round_stochastically(x, work, generator)
        np.copyto(values[:size], x, casting="unsafe")
        yield INT8_VALUES, begin, values[:filled]
        yield INT8_SCALES, begin // INT8_BLOCK, scale


def _scale(x: NDArray[np.float32], scale: NDArray[np.float32]) -> None:
    """Turn the blocks' largest magnitudes, passed in `scale`, into scales; divide x by them."""
    scale /= np.float32(127)
    np.minimum(scale, _LARGEST_SCALE, out=scale)
    # Subnormal scales are too coarse to divide by, so blocks below 127 · 2⁻¹²⁶ become zero.
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
    # Clip: division by a rounded scale may exceed 127 by one unit in the last place.
    np.clip(x, -127, 127, out=x)
