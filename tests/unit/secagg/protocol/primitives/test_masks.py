"""Masks: exact, seekable keystreams, indistinguishable from random bytes."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from potluck.secagg.protocol.primitives.agreement import (
    agree,
    derive,
    pair_seed,
    public_bytes,
    self_seed,
)
from potluck.secagg.protocol.primitives.masks import (
    CHUNK_BYTES,
    Mask,
    StreamCipher,
    add_masks,
    word_dtype,
)
from potluck.secagg.protocol.rules import BrokenRuleError, Rule

KEY = bytes(range(32))
COUNTING = [Mask(hashlib.sha256(bytes([index])).digest(), index % 2 == 1) for index in range(10)]


def test_aes_keystream_equals_the_published_vector() -> None:
    words = np.zeros(4, "<u4")
    add_masks(words, [Mask(KEY)])
    assert [f"{word:08x}" for word in words] == ["b60090f2", "d09f492a", "6a9af3a9", "80772edd"]


def test_chacha20_keystream_equals_rfc_8439() -> None:
    # The keystream for key and nonce of zeros: RFC 8439, appendix A.1, test vector 1.
    words = np.zeros(4, "<u4")
    add_masks(words, [Mask(bytes(32))], cipher=StreamCipher.CHACHA20)
    assert words.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_pair_seed_equals_the_published_vector() -> None:
    secret = agree(X25519PrivateKey.from_private_bytes(KEY), public_bytes(bytes(range(32, 64))))
    assert secret.hex() == "9663aa1da97e848a914a436d04163dfbb89178f107f1b5b77ed3854203382854"
    salt = hashlib.sha256(b"session").digest()
    expected = "532385858e30ca0fd9f4438167108c732e4abd21f887548250e942ee3f1d8816"
    assert pair_seed(secret, salt, 1, 2, "").hex() == expected
    assert pair_seed(secret, salt, 2, 1, "").hex() == expected
    info = b"flsa/1 mask" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    assert derive(secret, salt, info).hex() == expected


def test_mask_seeds_differ_by_vector_set_and_use() -> None:
    salts = [hashlib.sha256(text).digest() for text in (b"one", b"two")]
    seeds = {pair_seed(KEY, salt, 1, 2, vector) for salt in salts for vector in ("body", "head")}
    seeds |= {self_seed(KEY, salt, 1, vector) for salt in salts for vector in ("body", "head")}
    assert len(seeds) == 8


@pytest.mark.parametrize("point", [0, 1, 2**255 - 19 - 1])
def test_public_keys_of_low_order_are_refused(point: int) -> None:
    with pytest.raises(BrokenRuleError) as refused:
        agree(X25519PrivateKey.from_private_bytes(KEY), point.to_bytes(32, "little"))
    assert refused.value.rule is Rule.KEY


@pytest.mark.parametrize("cipher", StreamCipher)
@pytest.mark.parametrize("bits", [32, 64])
@settings(deadline=None)
@given(
    size=st.integers(1, 3 * CHUNK_BYTES // 4),
    cuts=st.lists(st.integers(0, 3 * CHUNK_BYTES // 4), max_size=4),
)
def test_slices_masked_separately_equal_the_whole_masked_vector(
    cipher: StreamCipher, bits: int, size: int, cuts: list[int]
) -> None:
    whole, pieces = np.zeros((2, size), word_dtype(bits))
    add_masks(whole, COUNTING[:3], cipher=cipher)
    borders = sorted({0, size, *(cut for cut in cuts if cut < size)})
    with ThreadPoolExecutor(2) as pool:
        for begin, end in pairwise(borders):
            pool.submit(add_masks, pieces[begin:end], COUNTING[:3], first=begin, cipher=cipher)
    assert np.array_equal(whole, pieces)
    add_masks(whole, [mask.opposite for mask in COUNTING[:3]], cipher=cipher)
    assert not whole.any()


def test_masking_words_of_unsupported_types_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        add_masks(np.zeros(3, np.float32), COUNTING)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        add_masks(np.zeros(6, np.uint32)[::2], COUNTING)
    with pytest.raises(ValueError, match="32 or 64"):
        word_dtype(16)


def test_mask_repr_does_not_contain_the_seed() -> None:
    assert repr(Mask(KEY)) == "Mask(negative=False)"


@pytest.mark.parametrize("bits", [32, 64])
def test_bytes_of_a_masked_vector_are_uniform(bits: int) -> None:
    words = np.arange(2**17 // (bits // 8), dtype=word_dtype(bits))
    add_masks(words, COUNTING)
    counts = np.bincount(words.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("bit", [0, 31])
def test_bits_of_summed_masks_have_no_linear_recurrence(bit: int) -> None:
    # The lowest bit of summed Mersenne Twisters has a linear complexity of 19,937 only; a good
    # cipher reaches half the length.
    words = np.zeros(48_000, "<u4")
    add_masks(words, COUNTING)
    bits = (words >> np.uint32(bit) & 1).astype(np.uint8)
    assert abs(linear_complexity(bits) - 24_000) <= 20


def test_linear_complexity_detects_a_mersenne_twister() -> None:
    words = np.random.RandomState(1).randint(0, 2**32, 48_000, dtype=np.uint32)
    assert linear_complexity((words & 1).astype(np.uint8)) == 19_937


def test_masked_zeros_and_masked_maxima_have_the_same_distribution() -> None:
    low, high = np.zeros(50_000, "<u4"), np.full(50_000, 2**32 - 1, "<u4")
    add_masks(low, COUNTING[:5])
    add_masks(high, COUNTING[5:])
    alike: Any = stats.ks_2samp(low, high)
    assert alike.pvalue > 1e-4


def linear_complexity(bits: NDArray[np.uint8]) -> int:
    """Return the length of the shortest linear feedback shift register, by Berlekamp and Massey
    over GF(2).

    Polynomials are whole numbers, bit i the coefficient of x^i; `window` holds the last bits, the
    newest lowest.
    """
    connection = previous = 1
    length, since, window = 0, 1, 0
    for position, bit in enumerate(bits.tolist()):
        window = window << 1 | bit
        if (connection & window).bit_count() & 1:
            saved = connection
            connection ^= previous << since
            if 2 * length <= position:
                length, previous, since = position + 1 - length, saved, 0
        since += 1
        window &= (1 << (length + 1)) - 1 if length > position else (1 << (position + 2)) - 1
    return length
