"""Loading weights: tensor names of torchvision, generated here, and file formats."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from torch import nn

from potluck.common.errors import ConfigurationError, LayoutError
from potluck.common.models.perceptron import perceptron
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.shards import INDEX, write_shards
from potluck.common.tensors.tensor_files import NamedTensors, write_tensors
from potluck.experiments.models.mobilenet import mobilenet_v2_gn
from potluck.experiments.models.resnet import resnet18_gn, resnet50_gn
from potluck.experiments.weights import fitted, read_weights
from potluck.server.reduce.publishing import load_weights

Arrays = dict[str, NDArray[Any]]


class Generated:
    """Creates a state dict in which every tensor has different values."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def tensor(self, name: str, *shape: int) -> None:
        self.arrays[name] = np.full(shape, len(self.arrays) + 1, dtype=np.float32)

    def normalised(self, convolution: str, norm: str, out: int, into: int, size: int) -> None:
        self.tensor(f"{convolution}.weight", out, into, size, size)
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.tensor(f"{norm}.{name}", out)
        self.arrays[f"{norm}.num_batches_tracked"] = np.array(7)

    def linear(self, name: str, out: int, into: int) -> None:
        self.tensor(f"{name}.weight", out, into)
        self.tensor(f"{name}.bias", out)


def torchvision_mobilenet() -> Arrays:
    made, width, number = Generated(), 32, 1
    made.normalised("features.0.0", "features.0.1", 32, 3, 3)
    for expansion, channels, blocks in (
        (1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1),
    ):  # fmt: skip
        for _ in range(blocks):
            at, inner, place = f"features.{number}.conv", width * expansion, 0
            if expansion > 1:
                made.normalised(f"{at}.0.0", f"{at}.0.1", inner, width, 1)
                place = 1
            made.normalised(f"{at}.{place}.0", f"{at}.{place}.1", inner, 1, 3)
            made.normalised(f"{at}.{place + 1}", f"{at}.{place + 2}", channels, inner, 1)
            width, number = channels, number + 1
    made.normalised("features.18.0", "features.18.1", 1280, 320, 1)
    made.linear("classifier.1", 1000, 1280)
    return made.arrays


def torchvision_resnet(blocks: tuple[int, ...], *, bottleneck: bool) -> Arrays:
    made, width = Generated(), 64
    made.normalised("conv1", "bn1", 64, 3, 7)
    for stage, count in enumerate(blocks):
        inner = 64 * 2**stage
        out = inner * (4 if bottleneck else 1)
        for block in range(count):
            at = f"layer{stage + 1}.{block}"
            shapes = [(inner, width, 3), (inner, inner, 3)]
            if bottleneck:
                shapes = [(inner, width, 1), (inner, inner, 3), (out, inner, 1)]
            for number, (rows, columns, size) in enumerate(shapes, start=1):
                made.normalised(f"{at}.conv{number}", f"{at}.bn{number}", rows, columns, size)
            if block == 0 and (stage > 0 or bottleneck):
                made.normalised(f"{at}.downsample.0", f"{at}.downsample.1", out, width, 1)
            width = out
    made.linear("fc", 1000, width)
    return made.arrays


CASES: Mapping[str, tuple[Arrays, nn.Module, int]] = {
    "mobilenetv2": (torchvision_mobilenet(), mobilenet_v2_gn(), 3_504_872),
    "resnet18": (torchvision_resnet((2, 2, 2, 2), bottleneck=False), resnet18_gn(), 11_689_512),
    "resnet50": (torchvision_resnet((3, 4, 6, 3), bottleneck=True), resnet50_gn(), 25_557_032),
}


@pytest.mark.parametrize("name", CASES)
def test_every_trained_torchvision_tensor_is_assigned_to_the_model(name: str) -> None:
    weights, model, parameters = CASES[name]
    found = fitted(weights, state_arrays(model))
    assert found.fresh == []
    assert all("running" in each or "num_batches" in each for each in found.dropped)
    assert sum(array.size for array in found.arrays.values()) == parameters
    # Values are equal in the order of both models, so no tensors were swapped.
    learned = [weights[each].flat[0] for each in weights if each not in found.dropped]
    assert sorted(array.flat[0] for array in found.arrays.values()) == sorted(learned)
    in_order = [array.flat[0] for array in found.arrays.values()]
    assert in_order == learned


def test_output_layer_for_different_classes_is_not_loaded() -> None:
    model = state_arrays(mobilenet_v2_gn(classes=2))
    found = fitted(torchvision_mobilenet(), model)
    assert found.fresh == ["classifier.1.weight", "classifier.1.bias"]
    assert np.array_equal(found.arrays["classifier.1.weight"], model["classifier.1.weight"])


def test_weights_under_the_names_of_the_model_are_loaded_unchanged() -> None:
    weights = {name: array + 1 for name, array in state_arrays(perceptron()).items()}
    found = fitted(weights, state_arrays(perceptron()))
    assert found.fresh == []
    assert all(np.array_equal(found.arrays[name], weights[name]) for name in weights)


def test_weights_of_another_model_are_refused_naming_the_tensor() -> None:
    with pytest.raises(LayoutError, match=r"'stem\.0\.weight' is missing, but \(64, 3"):
        fitted(torchvision_mobilenet(), state_arrays(resnet18_gn()))


# Files -----------------------------------------------------------------------------------------


def test_safetensors_and_torch_weight_files_are_read(tmp_path: Path) -> None:
    weights = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), dtype=np.float32)}
    save_file(weights, tmp_path / "w.safetensors")
    torch.save({name: torch.from_numpy(each) for name, each in weights.items()}, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        found = read_weights(tmp_path / name)
        assert {key: value.tolist() for key, value in found.items()} == {
            key: value.tolist() for key, value in weights.items()
        }


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_weight_file_that_would_execute_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "w.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Evil()))
    for name in ("w.pth", "plain.pth"):
        with pytest.raises(ConfigurationError, match="not a file of plain tensors"):
            read_weights(tmp_path / name)
    assert not (tmp_path / "evil").exists()


def test_a_run_starts_from_a_file_of_the_data_directory(tmp_path: Path) -> None:
    weights = {name: array + 1 for name, array in state_arrays(perceptron()).items()}
    write_tensors(tmp_path / "start.safetensors", weights)
    model = perceptron()
    load_weights(model, "start.safetensors", tmp_path)
    assert all(np.array_equal(each, weights[name]) for name, each in state_arrays(model).items())


def test_a_run_starts_from_shards(tmp_path: Path) -> None:
    weights = {name: array + 1 for name, array in state_arrays(perceptron()).items()}
    tensors = NamedTensors(layout=Layout.of(weights), arrays=weights)
    (tmp_path / "start").mkdir()
    write_shards(tensors, tmp_path / "start", shard_bytes=1, metadata={})
    for name in ("start", f"start/{INDEX}"):
        model = perceptron()
        load_weights(model, name, tmp_path)
        assert all(np.array_equal(a, weights[name]) for name, a in state_arrays(model).items())
    found = read_weights(tmp_path / "start")
    assert all(np.array_equal(found[name], array) for name, array in weights.items())


def test_half_precision_weights_are_converted_to_float32(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25, 1e-3])
    save_torch({"a": values.bfloat16(), "b": values.half()}, tmp_path / "w.safetensors")
    found = read_weights(tmp_path / "w.safetensors")
    assert found["a"].tolist() == values.bfloat16().float().tolist()
    assert found["b"].tolist() == values.half().float().tolist()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../other.safetensors", "in the coordinator's data directory"),
        ("start.pth", r"must name a \.safetensors file"),
        ("missing.safetensors", "create it with `potluck pretrained`"),
    ],
)
def test_weight_file_outside_the_data_directory_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "other.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=why):
        load_weights(perceptron(), name, tmp_path / "data")
    with pytest.raises(ConfigurationError, match="has no data directory"):
        load_weights(perceptron(), "start.safetensors", None)


def test_initial_weights_of_another_model_are_refused_naming_the_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "start.safetensors", state_arrays(perceptron(inputs=3)))
    with pytest.raises(LayoutError, match=r"start\.safetensors"):
        load_weights(perceptron(), "start.safetensors", tmp_path)
