"""Tensor files: compatible with safetensors in both directions; hostile files refused."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, NotFiniteError, StorageError
from potluck.common.tensors.digest import digest_of
from potluck.common.tensors.flat import FlatVector
from potluck.common.tensors.layout import DTYPES, parse_header
from potluck.common.tensors.tensor_files import (
    Layout,
    NamedTensors,
    check_finite,
    file_digest,
    open_tensors,
    write_tensors,
)

ARRAYS: dict[str, NDArray[Any]] = {
    "mask": np.array([True, False, True]),
    "fc.weight": np.arange(20, dtype=np.float32).reshape(4, 5),
    "bytes": np.arange(5, dtype=np.uint8),
    "steps": np.array(7, np.int64),
    "half": np.array([1.5, -2], np.float16),
    "double": np.array([[0.1]], np.float64),
    "empty": np.zeros((0, 3), np.float32),
    "int": np.array([-1], np.int32),
    "key": np.array([2**32 - 1], np.uint32),
    "seed": np.array([2**64 - 1], np.uint64),
    "signed byte": np.array([-128], np.int8),
    "größe": np.array([1], np.uint16),
    "short": np.array([-3], np.int16),
}


def same(first: NDArray[Any], second: NDArray[Any]) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.tobytes() == second.tobytes()
    )


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_written_tensors_are_read_back_aligned_read_only_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    digest = write_tensors(path, ARRAYS, sync=True)
    content = path.read_bytes()
    assert digest.size == len(content) == Layout.of(ARRAYS).file_bytes
    assert digest.blake3 == digest_of(content)
    assert file_digest(path) == digest
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with open_tensors(path, expected=Layout.of(ARRAYS)) as file:
        assert file.layout == Layout.of(ARRAYS)
        assert list(file.arrays) == list(ARRAYS)
        for name, array in ARRAYS.items():
            found = file.arrays[name]
            assert same(found, array)
            assert found.flags.aligned
            assert not found.flags.writeable


def test_reading_maps_the_file_without_copying(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"weight": np.zeros(3, np.float32)})
    with open_tensors(path) as file, path.open("r+b") as changed:
        changed.seek(-4, 2)
        changed.write(np.float32(5).tobytes())
        changed.flush()
        assert file.arrays["weight"].tolist() == [0, 0, 5]


def test_file_shortened_between_two_reads_raises_storage_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {"first": np.ones(10, np.float32), "second": np.ones(100_000, np.float32)}
    write_tensors(path, arrays)
    with open_tensors(path) as file:
        assert same(file.arrays["second"], arrays["second"])
        os.truncate(path, 1000)
        assert same(file.arrays["first"], arrays["first"])
        with pytest.raises(StorageError) as caught:
            _ = file.arrays["second"]
        assert str(path) in caught.value.message
        assert "the file was shortened to 1000 bytes" in caught.value.message
        vector = FlatVector(file.arrays, file.layout)
        with pytest.raises(StorageError, match="was shortened"):
            vector.block(50_000, 60_000)


def test_block_is_read_across_tensors_and_into_other_types(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        "a": np.arange(5, dtype=np.float32),
        "count": np.array(3),
        "b": np.arange(5, 12, dtype=np.float32).reshape(7, 1),
        "none": np.empty((0, 2), np.float32),
    }
    write_tensors(path, arrays)
    with open_tensors(path) as file:
        vector = FlatVector(file.arrays, file.layout)
        assert len(vector) == 12
        assert vector.block(3, 9).tolist() == [3, 4, 5, 6, 7, 8]
        assert vector.read(3, 9, np.empty(6)).tolist() == [3, 4, 5, 6, 7, 8]
        every_second = np.empty(12, np.float32)[::2]
        assert vector.read(3, 9, every_second).tolist() == [3, 4, 5, 6, 7, 8]
        assert vector.block(4, 4).size == 0


def test_names_and_layout_of_file_arrays_are_available_without_reading_values(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, ARRAYS)
    with open_tensors(path) as file:
        os.truncate(path, 0)
        assert Layout.of(file.arrays) == Layout.of(ARRAYS)
        assert next(iter(ARRAYS)) in file.arrays
        assert list(file.arrays) == list(ARRAYS)
        assert NamedTensors.some(file, Layout.of({})).arrays == {}


def test_safetensors_library_reads_written_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, ARRAYS)
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == ARRAYS.keys()
    assert all(same(loaded[name], array) for name, array in ARRAYS.items())


def test_files_written_by_the_safetensors_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "np"})
    with open_tensors(path, expected=Layout.of(ARRAYS)) as file:
        assert all(same(file.arrays[name], array) for name, array in ARRAYS.items())


def test_bfloat16_tensors_are_read_and_written_as_bits(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    tensor = torch.tensor([[1.0, -2.5, 3e38]], dtype=torch.bfloat16)
    safetensors.torch.save_file({"weight": tensor}, theirs)
    with open_tensors(theirs) as file:
        assert file.layout.parameters == 3
        assert file.arrays["weight"].dtype == np.uint16
        write_tensors(ours, file.arrays, layout=file.layout)
    assert torch.equal(safetensors.torch.load_file(ours)["weight"], tensor)


def test_array_remains_valid_after_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"weight": np.ones(4, np.float32)})
    with open_tensors(path) as file:
        kept = file.arrays["weight"]
    file.close()
    with pytest.raises(StorageError, match="Bad file descriptor"):
        _ = file.arrays["weight"]
    assert kept.tolist() == [1, 1, 1, 1]


def test_arrays_that_are_not_contiguous_are_written_in_c_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = tmp_path / "model.safetensors"
    write_tensors(path, {"transposed": array.T, "strided": array[:, ::2]})
    with open_tensors(path) as file:
        assert np.array_equal(file.arrays["transposed"], array.T)
        assert np.array_equal(file.arrays["strided"], array[:, ::2])


def test_equal_arrays_give_equal_files_and_parameter_counts(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert write_tensors(first, ARRAYS) == write_tensors(second, dict(ARRAYS))
    assert first.read_bytes() == second.read_bytes()
    assert Layout.of(ARRAYS).parameters == 20 + 2 + 1
    assert len(Layout.of(ARRAYS).header) % 8 == 0
    assert Layout.of({}).file_bytes == 16


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"fc.weight": np.zeros((10, 64), np.float32)},
            "update tensor 'fc.weight' has shape 10×64, but the model's tensor has shape 10×32",
        ),
        (
            {"fc.weight": np.zeros((10, 32), np.float16)},
            "update tensor 'fc.weight' has type F16, but the model's tensor has type F32",
        ),
        ({"fc.bias": np.zeros(1, np.float32)}, "the update lacks tensor 'fc.weight' of the model"),
        (
            {"fc.weight": np.zeros((10, 32), np.float32), "more": np.zeros(1, np.float32)},
            "update tensor 'more' is not in the model",
        ),
    ],
)
def test_unexpected_layout_is_described_in_the_error(
    tmp_path: Path, arrays: dict[str, NDArray[Any]], message: str
) -> None:
    path = tmp_path / "update"
    write_tensors(path, arrays)
    expected = Layout.of({"fc.weight": np.zeros((10, 32), np.float32)})
    with pytest.raises(LayoutError) as caught:
        open_tensors(path, expected=expected)
    assert caught.value.message == message


def described(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


TWO = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"v":{"dtype":"U8","shape":[1],'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\x00\x00", "too short"),
        (file_of(b""), "must begin with '{'"),
        ((2**60).to_bytes(8, "little") + b"{}", "too short"),
        (file_of(b"[]"), "must begin with '{'"),
        (file_of(b" {}"), "must begin with '{'"),
        (file_of(b"{} x"), "not JSON"),
        (file_of(b'{"\xff":1}'), "UnicodeDecodeError"),
        (file_of(b'{"a":' + b"[" * 100_000), "more brackets than"),
        (file_of(b'{"a":[' + b"[]," * 100_000 + b"0]}"), "more brackets than"),
        (
            file_of(b'{"a":' + b'{"a         ":' * 20_000 + b" " * 100_000),
            r"not JSON \((Recursion|JSONDecode)Error\)",
        ),
        (file_of(b'{"a":' + b"1" * 5_000 + b"}"), "not JSON"),
        (file_of({"w": 1}), "must be described by dtype"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_of({"__metadata__": []}), "__metadata__"),
        (file_of({"a\nb": {}}), r"name 'a\\nb' contains characters"),
        (file_of(b'{"\\ud800":{}}'), "can't be printed"),
        (file_of(described(dtype="F31"), bytes(8)), "dtype other than"),
        (file_of(described(dtype=[]), bytes(8)), "dtype other than"),
        (file_of(described(extra=1), bytes(8)), "must be described by dtype"),
        (file_of(described(shape=[-2]), bytes(8)), "sizes ≥ 0"),
        (file_of(described(shape=[2.0]), bytes(8)), "sizes ≥ 0"),
        (file_of(described(shape=[True, 2]), bytes(8)), "sizes ≥ 0"),
        (file_of(described(shape=[1] * 33 + [2]), bytes(8)), "at most 32"),
        (file_of(described(shape="2"), bytes(8)), "sizes ≥ 0"),
        (file_of(described(shape=[2**62, 2**62]), bytes(8)), "larger than any file"),
        (file_of(described(shape=[0, 2**62, 2**62], data_offsets=[0, 0])), "larger than any file"),
        (file_of(described(data_offsets=[0, 2**64]), bytes(8)), "two data_offsets"),
        (file_of(described(data_offsets=[0]), bytes(8)), "two data_offsets"),
        (file_of(described(data_offsets=[8, 0]), bytes(8)), "span -8"),
        (file_of(described(data_offsets=[0, 4]), bytes(8)), "needs 8 bytes"),
        (file_of(described(data_offsets=[4, 12]), bytes(12)), "is preceded by unused bytes"),
        (file_of(described(), bytes(7)), "contains 7 bytes"),
        (file_of(described(), bytes(9)), "contains 9 bytes"),
        (file_of(TWO + b'"data_offsets":[0,1]}}', bytes(1)), "overlaps another"),
        (file_of(TWO + b'"data_offsets":[2,3]}}', bytes(3)), "is preceded by unused bytes"),
        (file_of(b'{"w":1,"w":2}'), "twice"),
        (file_of(TWO[:-1] + b',"shape":[1],"data_offsets":[1,2]}}', bytes(2)), "twice"),
    ],
)
def test_malicious_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(LayoutError, match=message) as caught:
        open_tensors(path)
    assert "\n" not in caught.value.message


def test_header_longer_than_the_maximum_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_bytes(file_of(b"{" + b" " * 2**20 + b"}"))
    with pytest.raises(LayoutError, match="a header of 1048578 bytes, but at most"):
        open_tensors(path, expected=Layout.of({}))
    with pytest.raises(LayoutError, match="at most 100 bytes are accepted"):
        open_tensors(path, maximum_header_bytes=100)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**70)
    | st.floats()
    | st.sampled_from([*DTYPES, "dtype", "shape", "data_offsets", "w"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w", "v"]), inner
        )
    ),
    max_leaves=10,
)
near_headers = st.dictionaries(
    st.text(max_size=3) | st.just("__metadata__"),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(list(DTYPES)) | json_values,
            "shape": st.lists(st.integers(-1, 3) | st.sampled_from([2**63, 2**62]), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 12), min_size=1, max_size=3),
        }
    )
    | json_values,
    max_size=3,
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=near_headers.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=80),
    data=st.integers(0, 16),
    length=st.none() | st.integers(0, 2**64 - 1),
)
@example(header=json.dumps(described()).encode(), data=8, length=None)
def test_any_bytes_open_as_a_tensor_file_or_raise_layout_error(
    tmp_path: Path, header: bytes, data: int, length: int | None
) -> None:
    path = tmp_path / "fuzzed"
    prefix = (len(header) if length is None else length).to_bytes(8, "little")
    path.write_bytes(prefix + header + bytes(data))
    try:
        file = open_tensors(path)
    except LayoutError as error:
        assert "\n" not in error.message  # noqa: PT017  both outcomes are right
    else:
        assert sum(array.nbytes for array in file.arrays.values()) == data
        file.close()


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=4))
def test_damaged_header_gives_a_consistent_layout_or_is_refused(
    flips: list[tuple[int, int]],
) -> None:
    text = bytearray(Layout.of(ARRAYS).header[8:])
    for position, mask in flips:
        text[position % len(text)] ^= mask
    try:
        layout = parse_header(bytes(text))
    except LayoutError:
        assert flips
    else:
        assert layout.data_bytes == sum(tensor.end - tensor.begin for tensor in layout.tensors)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 65_536, 99_999])
def test_tensor_with_nan_or_infinity_is_named_in_the_error(
    tmp_path: Path, dtype: str, value: float, position: int
) -> None:
    if dtype == "BF16":
        array = np.zeros(100_000, np.uint16)
        array[position] = np.array(value, np.float32).view(np.uint32) >> 16
    else:
        array = np.zeros(100_000, DTYPES[dtype])
        array[position] = value
    layout = Layout.place([("fine", "F32", (2,)), ("broken", dtype, array.shape)])
    path = tmp_path / "update"
    write_tensors(path, {"fine": np.ones(2, np.float32), "broken": array}, layout=layout)
    with open_tensors(path) as file, pytest.raises(NotFiniteError, match="tensor 'broken' holds"):
        check_finite(file)


def test_large_finite_numbers_whose_sum_overflows_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "update"
    largest = np.finfo(np.float32).max
    write_tensors(
        path,
        {
            "large": np.full(1000, largest, np.float32),
            "half": np.full(1000, 65504, np.float16),
            "integers": np.full(3, -1, np.int64),
        },
    )
    with open_tensors(path) as file:
        check_finite(file)


def test_failed_write_leaves_the_previous_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model"
    digest = write_tensors(path, {"w": np.ones(2, np.float32)})
    largest_file = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Beyond this limit, write(2) fails as on a full disk. Python ignores the signal that the kernel
    # also sends.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, largest_file[1]))
    try:
        with pytest.raises(StorageError, match="of 400072 bytes: File too large"):
            write_tensors(path, {"w": np.broadcast_to(np.float32(0), (100_000,))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, largest_file)
    assert file_digest(path) == digest
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="No such file"):
        open_tensors(tmp_path / "missing")
    with pytest.raises(StorageError, match="No such file"):
        file_digest(tmp_path / "missing")


def test_arrays_that_do_not_match_the_layout_are_refused(tmp_path: Path) -> None:
    layout = Layout.place([("w", "F32", (2,))])
    for arrays in (
        {"w": np.zeros(2, np.float64)},
        {"w": np.zeros(3, np.float32)},
        {"v": np.zeros(2, np.float32)},
    ):
        with pytest.raises(LayoutError, match="layout"):
            write_tensors(tmp_path / "model", arrays, layout=layout)
    with pytest.raises(LayoutError, match="complex64"):
        Layout.of({"w": np.zeros(1, np.complex64)})
    with pytest.raises(LayoutError, match=">f4"):
        Layout.of({"w": np.zeros(1, ">f4")})


ONE = np.ones(1, np.float32)


def test_layout_of_some_tensors_is_that_of_a_file_with_only_those_tensors() -> None:
    arrays = {"q.base.weight": np.zeros((2, 3), np.float32), "count": np.array(3), "q.a": ONE}
    layout = Layout.of(arrays)
    assert layout.without(()) is layout
    rest = layout.without(("*.base.weight", "nothing"))
    assert rest == Layout.of({"count": arrays["count"], "q.a": ONE})
    some = NamedTensors.some(NamedTensors(layout=layout, arrays=arrays), rest)
    assert list(some.arrays) == ["count", "q.a"]
    assert some.arrays["q.a"] is ONE
