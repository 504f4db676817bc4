"""Masks: keystreams added to vectors modulo 2^32 or 2^64.

A mask is the keystream of a stream cipher under a 32-byte seed, read as unsigned little-endian
words. The streams are seekable, so that any slice of a vector can be masked or unmasked on its
own, and slices in parallel (the cipher and numpy both release the interpreter's lock). The order of
the loops makes it fast: the outer loop is over chunks of 256 KiB, the inner one over seeds. So a
chunk stays in a core's second-level cache while all keystreams are added to it.

Everything here is arithmetic on seeds. The client's side decides which seeds a client adds, and the
coordinator's `unmasking` which ones are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

CHUNK_BYTES: Final = 256 * 1024
"""Size of a chunk: all keystreams are added to one chunk of a vector before the next chunk."""

_AES_BLOCK: Final = 16
_CHACHA_BLOCK: Final = 64
_CACHE_LINE: Final = 64
_ZEROS: Final = memoryview(bytes(CHUNK_BYTES))

Words = NDArray[np.uint32] | NDArray[np.uint64]
"""Words of a vector, unsigned: dtype `<u4` or `<u8`."""


class StreamCipher(IntEnum):
    """The generator of masks, named in a session's header and never negotiated."""

    AES_256_CTR = 1
    """AES-256 in counter mode, the counter beginning at 0 (NIST SP 800-38A §6.5)."""
    CHACHA20 = 2
    """ChaCha20 with a zero nonce (RFC 8439 §2.4), for processors without AES instructions."""


@dataclass(frozen=True)
class Mask:
    """A keystream and its sign. seed: 32 bytes, secret."""

    seed: bytes = field(repr=False)
    negative: bool = False

    @property
    def opposite(self) -> Mask:
        """The mask that cancels this one."""
        return Mask(self.seed, not self.negative)


def word_dtype(modulus_bits: int) -> np.dtype[Any]:
    """Return the type of a vector's words. Raises ValueError for a modulus other than 2^32 and
    2^64."""
    if modulus_bits not in (32, 64):
        raise ValueError(f"the words of a vector must have 32 or 64 bits, not {modulus_bits}")
    return np.dtype(f"<u{modulus_bits // 8}")


def add_masks(
    words: Words,
    masks: Sequence[Mask],
    *,
    first: int = 0,
    cipher: StreamCipher = StreamCipher.AES_256_CTR,
) -> None:
    """Add masks to a slice of a vector, in place, modulo the vector's modulus.

    words: contiguous, `<u4` or `<u8`, elements [first, first + words.size) of the vector. May be
    called from several threads for slices that do not overlap. Raises ValueError for words of
    another type or layout.
    """
    if words.dtype not in (np.dtype("<u4"), np.dtype("<u8")) or not words.flags.c_contiguous:
        raise ValueError(
            "masks can be added to contiguous 32 or 64-bit words only, not to words "
            f"of type {words.dtype}"
        )
    flat = words.reshape(-1)
    width = flat.dtype.itemsize
    streams = [
        (keystream(mask.seed, first * width, cipher), np.subtract if mask.negative else np.add)
        for mask in masks
    ]
    step = CHUNK_BYTES // width
    # Align sums and keystreams to cache lines; the caller's words may not be aligned.
    sums, scratch = (_aligned(min(step, flat.size), flat.dtype) for _ in range(2))
    raw = scratch.data.cast("B")
    for begin in range(0, flat.size, step):
        chunk = flat[begin : begin + step]
        zeros, total, piece = _ZEROS[: chunk.nbytes], sums[: chunk.size], scratch[: chunk.size]
        np.copyto(total, chunk)
        for stream, combine in streams:
            stream.update_into(zeros, raw)
            combine(total, piece, total)
        np.copyto(chunk, total)


def _aligned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array that begins at a cache line."""
    data = np.empty(size * dtype.itemsize + _CACHE_LINE, np.uint8)
    begin = -data.ctypes.data % _CACHE_LINE
    return data[begin : begin + size * dtype.itemsize].view(dtype)


def keystream(seed: bytes, offset: int, cipher: StreamCipher) -> CipherContext:
    """Return a cipher that turns zeros into the keystream from byte `offset` ≥ 0 on."""
    if cipher is StreamCipher.CHACHA20:
        block, within = divmod(offset, _CHACHA_BLOCK)
        # The library's counter has 64 bits; RFC 8439's 32-bit counter would end after 256 GiB.
        nonce = block.to_bytes(8, "little") + bytes(8)
        stream = Cipher(algorithms.ChaCha20(seed, nonce), None).encryptor()
    else:
        block, within = divmod(offset, _AES_BLOCK)
        counter = modes.CTR(block.to_bytes(_AES_BLOCK, "big"))
        stream = Cipher(algorithms.AES256(seed), counter).encryptor()
    if within:
        stream.update(bytes(within))
    return stream
