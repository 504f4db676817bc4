"""Encodings: sizes, exactness, unbiasedness, and the same decoded bits everywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, NotFiniteError
from potluck.common.tensors.encoding import (
    INT8_BLOCK,
    EncodedUpdate,
    Encoding,
    encode,
    encoded_layout,
)
from potluck.common.tensors.tensor_files import (
    Layout,
    NamedTensors,
    TensorFile,
    open_tensors,
    write_tensors,
)

Arrays = dict[str, NDArray[Any]]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def model(seed: int, scale: float = 1.0) -> Arrays:
    draw = generator(seed)
    return {
        "conv.weight": (scale * draw.standard_normal((7, 3, 5))).astype(np.float32),
        "batches": np.array(seed, np.int64),
        "conv.bias": (scale * draw.standard_normal(7)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "fc.weight": (scale * draw.standard_normal((33, 21))).astype(np.float32),
        "mask": np.array([True, False]),
    }


def stored(path: Path, arrays: Arrays, encoding: Encoding, **options: Any) -> TensorFile:
    layout = encoded_layout(Layout.of(arrays), encoding)
    write_tensors(path, encode(arrays, encoding, **options), layout=layout)
    return open_tensors(path, expected=layout)


def flat(arrays: Arrays) -> NDArray[np.float32]:
    return np.concatenate([a.reshape(-1) for a in arrays.values() if a.dtype == np.float32])


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("delta", [False, True])
def test_decoded_update_has_the_model_layout_and_values_within_the_error(
    tmp_path: Path, encoding: Encoding, delta: bool
) -> None:
    base, arrays = model(1), model(1)
    for name, change in model(2, scale=0.01).items():
        if change.dtype == np.float32:
            arrays[name] = arrays[name] + change
    arrays["batches"] = np.array(9, np.int64)
    write_tensors(tmp_path / "base", base)
    with open_tensors(tmp_path / "base") as base_file:
        file = stored(
            tmp_path / "update",
            arrays,
            encoding,
            base=base if delta else None,
            generator=generator(),
        )
        update = EncodedUpdate(file, Layout.of(arrays), encoding, base_file if delta else None)
        update.check_numbers()
        decoded = update.decode_to_arrays()
    assert Layout.of(decoded) == Layout.of(arrays)
    assert list(decoded) == list(arrays)
    assert decoded["batches"] == 9
    assert decoded["mask"].tolist() == [True, False]
    sent = flat(arrays) - flat(base) if delta else flat(arrays)
    step = {
        Encoding.FLOAT32: 0.0,
        Encoding.BFLOAT16: 2.0**-8 * np.abs(sent).max(),
        Encoding.INT8: np.abs(sent).max() / 127,
    }[encoding]
    rounding = 2.0**-22 if delta else 0.0
    assert np.abs(flat(decoded) - flat(arrays)).max() <= step * 1.0001 + rounding


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("delta", [False, True])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, 805), max_size=6))
def test_decoded_blocks_have_the_same_bits_as_the_whole_update(
    tmp_path: Path, encoding: Encoding, delta: bool, cuts: list[int]
) -> None:
    arrays, base = model(3), model(4)
    layout = Layout.of(arrays)
    write_tensors(tmp_path / "base", base)
    with open_tensors(tmp_path / "base") as base_file:
        file = stored(
            tmp_path / "update",
            arrays,
            encoding,
            base=base if delta else None,
            generator=generator(),
        )
        update = EncodedUpdate(file, layout, encoding, base_file if delta else None)
        assert update.parameters == 105 + 7 + 693 == layout.parameters
        edges = sorted({0, *cuts, update.parameters})
        scratch = np.empty(update.parameters, np.float32)
        joined = [update.block(begin, end, scratch).copy() for begin, end in pairwise(edges)]
        assert np.concatenate(joined).tobytes() == flat(update.decode_to_arrays()).tobytes()


def test_float32_block_is_copied_at_most_once(tmp_path: Path) -> None:
    file = stored(tmp_path / "update", model(1), Encoding.FLOAT32)
    scratch = np.empty(100, np.float32)
    block = EncodedUpdate(file, file.layout).block(10, 100, scratch)
    assert np.shares_memory(block, scratch)
    arrays = dict(file.arrays)
    named = NamedTensors(layout=file.layout, arrays=arrays)
    block = EncodedUpdate(named, file.layout).block(10, 100, scratch)
    assert np.shares_memory(block, arrays["conv.weight"])


def test_bfloat16_encoding_rounds_as_torch(tmp_path: Path) -> None:
    bits = generator().integers(0, 2**32, 300_000, dtype=np.uint32)
    halfway = (bits[:10_000] & 0xFFFF0000) | 0x8000
    specials = np.array([0, 2**31, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1], np.uint32)
    values = np.concatenate([bits, halfway, specials]).view(np.float32)
    numbers = values[~np.isnan(values)]
    encoded = encode({"w": numbers}, Encoding.BFLOAT16)["w"]
    theirs = torch.from_numpy(numbers).to(torch.bfloat16)
    assert np.array_equal(encoded, theirs.view(torch.uint16).numpy())
    nan = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    kept = (encode({"w": nan}, Encoding.BFLOAT16)["w"].astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(kept).all()


def test_int8_encoding_is_unbiased_over_a_thousand_draws(tmp_path: Path) -> None:
    draw = generator(5)
    values = draw.standard_normal(5 * INT8_BLOCK + 17).astype(np.float32)
    values[:INT8_BLOCK] *= np.float32(1e-20)
    values[INT8_BLOCK : 2 * INT8_BLOCK] *= np.float32(1e20)
    values[3] = 0
    arrays = {"w": values}
    rounds = 1000
    encodings = [encode(arrays, Encoding.INT8, generator=draw) for _ in range(rounds)]
    scales = np.repeat(encodings[0]["int8/scales"], INT8_BLOCK)[: values.size]
    decoded = np.stack([encoded["int8"] for encoded in encodings]) * scales.astype(np.float64)
    error = (decoded.mean(axis=0) - values) / scales
    # One rounding has a standard deviation of at most ½ step.
    deviation = 0.5 / np.sqrt(rounds)
    assert np.abs(error).max() < 5 * deviation
    assert abs(error.mean()) < 5 * deviation / np.sqrt(values.size)
    assert (np.abs(decoded - values) <= 1.0001 * scales).all()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.5, 0.9, 1.0])
def test_stochastic_rounding_rounds_up_with_the_correct_probability(share: float) -> None:
    values = np.full(256 * INT8_BLOCK, 126 + share, np.float32)
    values[::INT8_BLOCK] = 127
    for sign in (1, -1):
        encoded = encode({"w": sign * values}, Encoding.INT8, generator=generator(1))
        assert (encoded["int8/scales"] == 1).all()
        kept = encoded["int8"].reshape(-1, INT8_BLOCK)[:, 1:].astype(np.float64)
        tolerance = 5 * np.sqrt(share * (1 - share) / kept.size) + 2.0**-16
        assert abs(kept.mean() * sign - (126 + share)) <= tolerance
        assert (encoded["int8"][::INT8_BLOCK] == sign * 127).all()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(300),
        np.full(130, np.finfo(np.float32).max),
        np.full(130, -np.finfo(np.float32).max),
        np.full(130, np.finfo(np.float32).smallest_subnormal),
        np.full(3, np.finfo(np.float32).tiny * 127),
        np.linspace(-1, 1, 1000),
    ],
)
def test_int8_encoding_of_extreme_values_stays_within_the_error(
    tmp_path: Path, values: NDArray[np.float64]
) -> None:
    array = values.astype(np.float32)
    file = stored(tmp_path / "update", {"w": array}, Encoding.INT8, generator=generator())
    update = EncodedUpdate(file, Layout.of({"w": array}), Encoding.INT8)
    assert np.isfinite(update.decode_to_arrays()["w"]).all()
    largest = np.abs(array).max()
    error = np.abs(update.decode_to_arrays()["w"].astype(np.float64) - array).max()
    assert error <= max(largest / 127 * 1.0001, 127 * np.finfo(np.float32).tiny)


@pytest.mark.parametrize("tensors", [1, 60])
def test_int8_deltas_are_at_most_27_percent_of_float32(tmp_path: Path, tensors: int) -> None:
    arrays: Arrays = {
        f"layer{index}.bias": generator(index).standard_normal(30_000 // tensors).astype(np.float32)
        for index in range(tensors)
    }
    base = {name: array + np.float32(0.1) for name, array in arrays.items()}
    whole = write_tensors(tmp_path / "float32", arrays)
    layout = encoded_layout(Layout.of(arrays), Encoding.INT8)
    delta = write_tensors(
        tmp_path / "int8",
        encode(arrays, Encoding.INT8, base=base, generator=generator()),
        layout=layout,
    )
    assert delta.size == layout.file_bytes
    assert delta.size <= 0.27 * whole.size


def test_int8_encoding_is_reproducible_for_the_same_generator_state() -> None:
    first = encode(model(1), Encoding.INT8, generator=generator(7))
    second = encode(model(1), Encoding.INT8, generator=generator(7))
    third = encode(model(1), Encoding.INT8, generator=generator(8))
    assert first["int8"].tobytes() == second["int8"].tobytes()
    assert first["int8"].tobytes() != third["int8"].tobytes()


def test_int8_decoding_equals_reference_bits(tmp_path: Path) -> None:
    base = {"w": np.array([1, -1, 0.1], np.float32)}
    encoded: Arrays = {
        "int8": np.array([127, -3, 1], np.int8),
        "int8/scales": np.array([0.1], np.float32),
    }
    write_tensors(tmp_path / "base", base)
    write_tensors(tmp_path / "update", encoded)
    with open_tensors(tmp_path / "base") as base_file, open_tensors(tmp_path / "update") as file:
        decoded = EncodedUpdate(file, base_file.layout, Encoding.INT8, base_file).decode_to_arrays()
    # fl(fl(127 · fl(0.1)) + 1), each operation rounded once to binary32.
    assert decoded["w"].view(np.uint32).tolist() == [0x415B3333, 0xBFA66666, 0x3E4CCCCD]


def test_int8_encoding_refuses_nan_and_a_missing_generator() -> None:
    arrays = model(1)
    arrays["fc.weight"][3, 3] = np.nan
    with pytest.raises(NotFiniteError, match=r"tensor 'fc.weight' holds NaN"):
        encode(arrays, Encoding.INT8, generator=generator())
    with pytest.raises(ValueError, match="pass a generator"):
        encode(model(1), Encoding.INT8)


def test_decoded_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "update",
        {"int8": np.full(3, 127, np.int8), "int8/scales": np.array([3e38], np.float32)},
    )
    layout = Layout.of({"a": np.zeros(1, np.float32), "b": np.zeros(2, np.float32)})
    with open_tensors(tmp_path / "update") as file:
        update = EncodedUpdate(file, layout, Encoding.INT8)
        with pytest.raises(NotFiniteError, match="tensor 'a'"):
            update.check_numbers()


def test_layouts_that_cannot_be_encoded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="'w' is F64; make the model's"):
        encoded_layout(Layout.of({"w": np.zeros(1)}), Encoding.FLOAT32)
    with pytest.raises(LayoutError, match="'int8' has a name that is reserved for int8 files"):
        encoded_layout(Layout.of({"int8": np.zeros(1, np.int64)}), Encoding.INT8)
    file = stored(tmp_path / "update", model(1), Encoding.INT8, generator=generator())
    layout = Layout.of({"w": np.zeros(3, np.float32)})
    with pytest.raises(
        LayoutError, match="tensor 'int8' has shape 805, but the model's tensor has shape 3"
    ):
        EncodedUpdate(file, layout, Encoding.INT8)
    base = stored(tmp_path / "base", {"w": np.zeros(3, np.float32)}, Encoding.FLOAT32)
    with pytest.raises(LayoutError, match=r"the base lacks tensor 'conv.weight' of the model"):
        EncodedUpdate(file, Layout.of(model(1)), Encoding.INT8, base)
