"""Updates in fixed point: sums are exact, in whatever order and grouping they are added."""

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, OutOfBoundsError, PotluckError
from potluck.common.tensors.tensor_files import open_tensors, write_tensors
from potluck.common.updates.fixed_point import (
    LARGEST_WORD,
    MOST_MEMBERS,
    FixedPointTerms,
    Words,
    check_words,
    members_digest,
    quantise,
)
from potluck.common.updates.sum_files import (
    BLOCK_WORDS,
    BODY,
    PackedWords,
    WordReader,
    add_files,
    opened_sum_file,
    pack,
    vectors_of,
    width_of,
    write_sum_file,
)

TERMS = FixedPointTerms(quantum_bits=30, weight_unit=64, weight_cap=1000)
LENGTHS = (1, 7, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS - 1)


def quantised(values: list[float], weight: int, terms: FixedPointTerms = TERMS) -> Words:
    out = np.empty(len(values), np.int64)
    quantise(np.array(values, np.float64), terms.factor(weight), out)
    return out


def reader(words: Words) -> WordReader:
    return lambda begin, end: words[begin:end].copy()


def write(path: Path, words: Words, *ids: str) -> Path:
    write_sum_file(path, {BODY: reader(words)}, {BODY: words.size}, members_digest(ids))
    return path


def read(path: Path) -> Words:
    with opened_sum_file(path) as file:
        return file.reader(BODY)(0, file.vectors[BODY])


def random_words(seed: int, length: int, bits: int) -> Words:
    return np.random.default_rng(seed).integers(-(2**bits), 2**bits, length, np.int64)


# Rounding -----------------------------------------------------------------------------------------


@given(st.floats(-100, 100, width=32), st.integers(1, 2**31), st.sampled_from([1, 2, 1024, 2**31]))
def test_quantised_word_is_the_nearest_integer(value: float, samples: int, unit: int) -> None:
    terms = FixedPointTerms(quantum_bits=20, weight_unit=unit, weight_cap=1000)
    weight = terms.weight(samples)
    assert 1 <= weight <= 1000
    exact = Fraction(value) * weight * 2**20 / unit
    if abs(exact) <= LARGEST_WORD:
        [word] = quantised([value], weight, terms).tolist()
        assert abs(word - exact) <= Fraction(1, 2)


def test_quantisation_rounds_ties_to_even() -> None:
    terms = FixedPointTerms(quantum_bits=1, weight_unit=1, weight_cap=1)
    assert quantised([0.25, 0.75, 1.25, -0.25, -0.75], 1, terms).tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**20, -(2.0**20)])
def test_value_too_large_for_a_word_is_refused(value: float) -> None:
    with pytest.raises(OutOfBoundsError, match="quantum_bits"):
        quantised([0.0, value], 1000)


def test_sum_of_the_maximum_number_of_clients_does_not_overflow() -> None:
    largest = np.array([LARGEST_WORD, -LARGEST_WORD], np.int64)
    assert (largest * MOST_MEMBERS).tolist() == [
        LARGEST_WORD * MOST_MEMBERS,
        -LARGEST_WORD * MOST_MEMBERS,
    ]
    check_words(largest * 3, 3)
    with pytest.raises(OutOfBoundsError, match="over 2 clients"):
        check_words(largest * 3, 2)


@pytest.mark.parametrize(
    "terms",
    [
        FixedPointTerms(quantum_bits=0, weight_unit=1, weight_cap=1),
        FixedPointTerms(quantum_bits=45, weight_unit=1, weight_cap=1),
        FixedPointTerms(quantum_bits=30, weight_unit=3, weight_cap=1),
        FixedPointTerms(quantum_bits=30, weight_unit=0, weight_cap=1),
        FixedPointTerms(quantum_bits=30, weight_unit=2**32, weight_cap=1),
        FixedPointTerms(quantum_bits=30, weight_unit=1, weight_cap=0),
    ],
)
def test_fixed_point_terms_out_of_range_are_refused(terms: FixedPointTerms) -> None:
    with pytest.raises(LayoutError, match="invalid settings of fixed point"):
        terms.check()


def test_scaled_sum_equals_the_weighted_mean() -> None:
    TERMS.check()
    weights = [3, 1000, 17]
    values = np.random.default_rng(0).normal(0, 0.01, (3, 5))
    total = sum(quantised(list(v), w) for v, w in zip(values, weights, strict=True))
    mean = np.asarray(total) * TERMS.scale(sum(weights))
    np.testing.assert_allclose(mean, np.average(values, axis=0, weights=weights), atol=1e-9)


# Packing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "width"),
    [
        (0, 0),
        (1, 1),
        (127, 1),
        (-128, 1),
        (128, 2),
        (-129, 2),
        (2**31 - 1, 4),
        (-(2**31), 4),
        (2**31, 5),
        (2**63 - 1, 8),
        (-(2**63), 8),
    ],
)
def test_block_width_is_that_of_its_largest_word(word: int, width: int) -> None:
    assert width_of(np.array([0, word], np.int64)) == width


@given(arrays(np.int64, st.integers(0, 20)), st.integers(0, 63))
def test_packed_words_are_unpacked_unchanged(words: Words, shift: int) -> None:
    words = words >> shift
    widths, packed = pack(reader(words), words.size)
    unpacked = PackedWords(widths, packed, words.size)
    assert unpacked.read(0, words.size).tolist() == words.tolist()


@pytest.mark.parametrize("bits", range(0, 64, 5))
def test_packed_bytes_are_the_little_endian_bytes_of_the_words(bits: int) -> None:
    words = random_words(bits, 9, 62) >> (62 - min(bits, 62))
    widths, packed = pack(reader(words), words.size)
    [width] = widths.tolist()
    expected = [word.to_bytes(width, "little", signed=True) for word in words.tolist()]
    assert packed.tobytes() == b"".join(expected)


@pytest.mark.parametrize("place", [0, BLOCK_WORDS, 2 * BLOCK_WORDS + 1])
def test_block_wider_than_needed_is_refused_at_any_position(place: int) -> None:
    words = random_words(1, 2 * BLOCK_WORDS + 2, 20)
    widths, packed = pack(reader(words), words.size)
    PackedWords(widths, packed, words.size).check(1)
    begin = place // BLOCK_WORDS * BLOCK_WORDS
    words[begin : begin + BLOCK_WORDS] >>= 10
    narrower, _ = pack(reader(words), words.size)
    assert (narrower != widths).sum() == 1
    wide = np.concatenate(
        [
            np.frombuffer(word.to_bytes(int(width), "little", signed=True), np.uint8)
            for number, width in enumerate(widths)
            for word in words[number * BLOCK_WORDS : (number + 1) * BLOCK_WORDS].tolist()
        ]
    )
    with pytest.raises(LayoutError, match="is 3 bytes wide, but needs only 2"):
        PackedWords(widths, wide, words.size).check(1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("bits", [0, 7, 12, 23, 31, 38, 46, 54, 62])
def test_each_block_of_words_can_be_read_alone(length: int, bits: int) -> None:
    words = random_words(bits, length, bits)
    words[:BLOCK_WORDS] >>= min(bits, 9)  # so that blocks have different widths
    packed = PackedWords(*pack(reader(words), length), length)
    for begin, end in pairwise([*range(0, length, BLOCK_WORDS), length]):
        assert np.array_equal(packed.read(begin, end), words[begin:end])


def test_packed_words_are_at_most_4_01_bytes_per_parameter() -> None:
    update = np.random.default_rng(0).normal(0, 0.02, 2**18)
    words = sum(quantised(list(update), 64) for _ in range(10))
    widths, packed = pack(reader(np.asarray(words)), update.size)
    assert packed.size + widths.size <= 4.01 * update.size


def test_packed_words_with_wrong_block_widths_are_refused() -> None:
    words = random_words(0, BLOCK_WORDS + 5, 20)
    widths, packed = pack(reader(words), words.size)
    for wrong in (widths[:1], widths + np.uint8(1), widths * 0, widths + np.uint8(6)):
        with pytest.raises(LayoutError):
            PackedWords(wrong, packed, words.size)
    with pytest.raises(LayoutError):
        PackedWords(widths, packed[:-1], words.size)


def test_zero_block_wider_than_needed_is_refused() -> None:
    wide = np.zeros(4, np.int64).view(np.uint8)
    packed = PackedWords(np.array([8], np.uint8), wide, 4)
    with pytest.raises(LayoutError, match="is 8 bytes wide, but needs only 0"):
        packed.check(1)


# Files --------------------------------------------------------------------------------------------


@settings(deadline=None)  # writing files may be slow
@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=3), st.data())
def test_sum_files_added_in_any_grouping_give_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    order: list[int],
    cuts: list[int],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("words")
    length = data.draw(st.sampled_from([1, 50]))
    ids = [f"run/1.1/client-{index}" for index in range(6)]
    single = [
        write(folder / f"{index}", random_words(index, length, 40), name)
        for index, name in enumerate(ids)
    ]
    flat = add_files(folder / "flat", single, members_digest(ids))
    bounds = sorted({0, 6, *cuts})
    groups = []
    for begin, end in pairwise(bounds):
        members = order[begin:end]
        path = folder / f"group-{begin}"
        add_files(path, [single[m] for m in members], members_digest(ids[m] for m in members))
        groups.append(path)
    grouped = add_files(folder / "grouped", groups, members_digest(reversed(ids)))
    assert grouped == flat
    total = sum(random_words(index, length, 40) for index in range(6))
    assert np.array_equal(read(folder / "grouped"), np.asarray(total))


def test_sum_file_is_accepted_only_for_its_own_members(tmp_path: Path) -> None:
    path = write(tmp_path / "sum", random_words(0, 10, 30), "a", "b")
    with opened_sum_file(path, {BODY: 10}) as file:
        file.check(members_digest(["b", "a"]), 2)
        with pytest.raises(LayoutError, match="other updates"):
            file.check(members_digest(["a"]), 1)
    zeros = np.zeros(10, np.int64)
    one, other = write(tmp_path / "one", zeros, "a"), write(tmp_path / "other", zeros, "b")
    assert one.read_bytes() != other.read_bytes()
    assert members_digest(["ab", "c"]) != members_digest(["a", "bc"])


def test_sum_too_large_for_its_members_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "sum", np.array([2 * LARGEST_WORD], np.int64), "a")
    with opened_sum_file(path) as file, pytest.raises(OutOfBoundsError):
        file.check(members_digest(["a"]), 1)


def test_sum_file_of_another_model_is_refused(tmp_path: Path) -> None:
    vectors = vectors_of(10, ["control"])
    path = write(tmp_path / "sum", random_words(0, 10, 30), "a")
    with (
        pytest.raises(LayoutError, match="'auxiliary/control' of 10"),
        opened_sum_file(path, vectors),
    ):
        pass
    other = write(tmp_path / "other", random_words(0, 11, 30), "b")
    with pytest.raises(LayoutError, match="'body' of 11"):
        add_files(tmp_path / "both", [path, other], members_digest(["a", "b"]))


def test_malicious_sum_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "sum", random_words(0, 10, 30), "a")
    with open_tensors(path) as file:
        good = {name: array.copy() for name, array in file.arrays.items()}
    changes: list[dict[str, NDArray[Any]]] = [
        {"members": np.zeros(31, np.uint8)},
        {"members": np.zeros(32, np.int8)},
        {"more": np.zeros(1, np.uint8)},
        {"body/length": np.array([2**64 - 1], np.uint64)},
        {"body/length": np.array([4097], np.uint64)},
        {"body/length": np.array([9], np.uint64)},
        {"body/length": np.zeros(0, np.uint64)},
        {"body/widths": np.array([9], np.uint8)},
        {"body/widths": np.zeros((1, 1), np.uint8)},
        {"body/lanes": np.zeros(0, np.uint8)},
        {"other/length": np.array([0], np.uint64)},
    ]
    for change in changes:
        write_tensors(path, good | change)
        with pytest.raises(LayoutError), opened_sum_file(path, {BODY: 10}):
            pass
    del good["members"]
    write_tensors(path, good)
    with pytest.raises(LayoutError, match="lacks tensor 'members'"), opened_sum_file(path):
        pass


@settings(deadline=None)  # writing files may be slow
@given(st.data())
def test_sum_file_with_a_changed_byte_is_read_or_raises_potluck_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("words") / "sum", random_words(0, 50, 30), "a")
    text = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(text))
    try:
        with opened_sum_file(path) as file:
            file.check(members_digest(["a"]), 1)
    except PotluckError:
        pass
