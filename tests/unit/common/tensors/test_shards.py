"""Weights in several files, compatible with Hugging Face's libraries in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from potluck.common.errors import LayoutError, StorageError
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.shards import INDEX, opened_weights, write_shards
from potluck.common.tensors.tensor_files import NamedTensors

WEIGHTS: dict[str, NDArray[Any]] = {
    f"layer.{number}": np.full((10, 10), number, np.float32) for number in range(5)
} | {"steps": np.array(7, np.int64)}


def written(folder: Path, shard_bytes: int) -> list[str]:
    tensors = NamedTensors(layout=Layout.of(WEIGHTS), arrays=WEIGHTS)
    paths = write_shards(tensors, folder, shard_bytes=shard_bytes, metadata={"format": "pt"})
    return [path.name for path in paths]


def test_written_shards_are_full_and_read_by_safetensors(tmp_path: Path) -> None:
    names = written(tmp_path, 900)
    assert names == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 5 * 400 + 8, "format": "pt"}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "np") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert np.array_equal(shard.get_tensor(name), WEIGHTS[name])
    assert list(index["weight_map"]) == list(WEIGHTS)


@pytest.mark.parametrize("shard_bytes", [1, 900, 10**6])
@pytest.mark.parametrize("name", ["", INDEX])
def test_written_weights_are_read_back(tmp_path: Path, shard_bytes: int, name: str) -> None:
    names = written(tmp_path, shard_bytes)
    if shard_bytes == 10**6:
        assert names == ["model.safetensors"]
        name = name and names[0]
    with opened_weights(tmp_path / name) as weights:
        assert weights.layout.by_name.keys() == WEIGHTS.keys()
        assert all(np.array_equal(weights.arrays[name], array) for name, array in WEIGHTS.items())


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"a": "../b.safetensors"}}, "files next to it"),
        ({"weight_map": {"a": "b.bin"}}, "files next to it"),
        ({"weight_map": {"a": 3}}, "not an index of shards"),
        ({"weight_map": {}}, "not an index of shards"),
        ([], "not an index of shards"),
        ({"weight_map": {"b": "s.safetensors"}}, "lacks tensor 'b'"),
    ],
)
def test_shard_index_that_contradicts_its_files_is_refused(
    tmp_path: Path, index: object, why: str
) -> None:
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, tmp_path / "s.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(LayoutError, match=why), opened_weights(tmp_path):
        pass


def test_missing_shard_is_named_in_the_error(tmp_path: Path) -> None:
    written(tmp_path, 900)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StorageError, match="model-00002-of-00003"), opened_weights(tmp_path):
        pass
