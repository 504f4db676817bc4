"""A model is divided into tensors that are sent and a base that all machines have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from potluck.common.errors import ConfigurationError, LayoutError
from potluck.common.settings.model_table import ModelTable
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.model_parts import DividedModel, divided
from potluck.common.tensors.shards import write_shards
from potluck.common.tensors.tensor_files import NamedTensors, write_tensors


class Network(nn.Module):
    """A network of a body with running statistics, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.norm(self.body(inputs)))
        return outputs


def made(seed: int = 1) -> Network:
    torch.manual_seed(seed)
    return Network()


def table(**values: object) -> ModelTable:
    return ModelTable.model_validate({"trainable": ["head.*"], **values})


def written(folder: Path, network: nn.Module, name: str = "base.safetensors") -> str:
    write_tensors(folder / name, state_arrays(network))
    return name


def head(parts: DividedModel, value: float) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, value) for name, array in parts.arrays().items()}


def test_whole_model_is_sent_without_patterns() -> None:
    for whole in (None, ModelTable(name="lenet5")):
        parts = divided(made(), whole, None)
        assert parts.layout == Layout.of(state_arrays(made()))
        assert parts.base_blake3 == ""
        assert all(parameter.requires_grad for parameter in parts.network.parameters())


def test_only_tensors_that_match_trainable_are_sent_and_trained() -> None:
    parts = divided(made(), table(trainable=["head.*", "norm.weight"]), None)
    assert list(parts.layout.by_name) == ["norm.weight", "head.weight", "head.bias"]
    trained = [name for name, each in parts.network.named_parameters() if each.requires_grad]
    assert trained == ["norm.weight", "head.weight", "head.bias"]


def test_training_leaves_the_base_unchanged() -> None:
    parts = divided(made(), table(), None)
    before = {name: array.copy() for name, array in state_arrays(parts.network).items()}
    parts.network.train()
    parts.network(torch.randn(8, 3)).sum().backward()
    with torch.no_grad():
        for parameter in parts.network.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    assert not np.array_equal(state_arrays(parts.network)["norm.running_mean"], np.zeros(4))
    parts.load(head(parts, 7.0))
    after = state_arrays(parts.network)
    assert all(
        (after[name] == 7).all() if name.startswith("head") else np.array_equal(after[name], array)
        for name, array in before.items()
    )


def test_changed_base_is_detected() -> None:
    parts = divided(made(), table(), None)
    parts.network.get_buffer("norm.running_mean").fill_(3)
    parts.check_base()
    with torch.no_grad():
        parts.network.get_parameter("body.bias").add_(1)
    with pytest.raises(LayoutError, match=r"training has changed tensors of the base model"):
        parts.check_base()


def test_model_of_named_arrays_can_not_be_trained_in_part() -> None:
    arrays = {"a": np.zeros(3)}
    assert list(divided(arrays, None, None).arrays()) == ["a"]
    with pytest.raises(ConfigurationError, match="`trainable` needs a torch module"):
        divided(arrays, table(), None)


def test_loading_tensors_other_than_the_sent_ones_is_refused() -> None:
    parts = divided(made(), table(), None)
    with pytest.raises(LayoutError, match=r"'head\.weight'"):
        parts.load({"head.bias": np.zeros(2, np.float32)})
    with pytest.raises(LayoutError, match=r"'body\.bias' is not in"):
        parts.load({**head(parts, 0.0), "body.bias": np.zeros(4, np.float32)})


@pytest.mark.parametrize("form", ["file", "half", "shards"])
def test_base_is_loaded_from_any_supported_file_format(tmp_path: Path, form: str) -> None:
    whole = made(1)
    if form == "half":
        whole.half().float()
        arrays = {name: array.astype(np.float16) for name, array in state_arrays(whole).items()}
        arrays["norm.num_batches_tracked"] = np.array(0)
        write_tensors(tmp_path / "base", arrays)
        (tmp_path / "base").rename(tmp_path / "base.safetensors")
        name = "base.safetensors"
    elif form == "shards":
        arrays, name = state_arrays(whole), "base"
        (tmp_path / name).mkdir()
        tensors = NamedTensors(layout=Layout.of(arrays), arrays=arrays)
        write_shards(tensors, tmp_path / name, shard_bytes=32, metadata={})
    else:
        name = written(tmp_path, whole)
    expected = divided(whole, table(), None)
    other = divided(made(2), table(base=name), tmp_path)
    assert other.base_blake3 == expected.base_blake3
    assert torch.equal(other.network.get_parameter("body.weight"), whole.body.weight)
    assert torch.equal(other.network.get_parameter("head.weight"), whole.head.weight)
    same = table(base=name, base_blake3=expected.base_blake3)
    divided(made(3), same, tmp_path)


def test_trainable_tensors_missing_from_the_base_file_are_taken_from_the_task(
    tmp_path: Path,
) -> None:
    arrays = state_arrays(made(1))
    arrays["head.weight"] = np.zeros((9, 4), np.float32)  # as for another number of classes
    del arrays["head.bias"]
    write_tensors(tmp_path / "base.safetensors", arrays)
    parts = divided(made(2), table(base="base.safetensors"), tmp_path)
    expected = state_arrays(made(2))
    for name in ("head.weight", "head.bias"):
        assert np.array_equal(parts.arrays()[name], expected[name])


def adapted(seed: int) -> nn.Module:
    """Return a network like those that `peft` makes: its own layers are inside other layers, under
    longer names."""
    network = made(seed)
    body = nn.Module()
    body.base_layer, body.lora_A = network.body, nn.Linear(3, 2, bias=False)
    network.body = body  # type: ignore[assignment]
    inner, outer = nn.Module(), nn.Module()
    inner.model, outer.base_model = network, inner
    return outer


def test_adapters_wrap_the_base_loaded_from_a_file(tmp_path: Path) -> None:
    name = written(tmp_path, made(1))
    parts = divided(adapted(2), table(trainable=["*lora_A*"], base=name), tmp_path)
    body = parts.network.get_parameter("base_model.model.body.base_layer.weight")
    assert torch.equal(body, made(1).body.weight)
    assert list(parts.layout.by_name) == ["base_model.model.body.lora_A.weight"]


def test_tied_tensors_are_loaded_from_a_file_that_has_one_of_them(tmp_path: Path) -> None:
    network = made(2)
    network.twin = nn.Linear(4, 4)
    network.twin.weight = network.tied = nn.Parameter(torch.zeros(4, 4))
    arrays = {**state_arrays(network), "tied": np.ones((4, 4), np.float32)}
    del arrays["twin.weight"]
    write_tensors(tmp_path / "base.safetensors", arrays)
    parts = divided(network, table(base="base.safetensors"), tmp_path)
    assert (parts.network.get_parameter("twin.weight") == 1).all()


def test_base_other_than_that_of_the_run_is_refused(tmp_path: Path) -> None:
    digest = divided(made(1), table(), None).base_blake3
    with pytest.raises(ConfigurationError, match=r"\(from the task's model\) has the digest"):
        divided(made(2), table(base_blake3=digest), None)
    other = table(base=written(tmp_path, made(2)), base_blake3=digest)
    with pytest.raises(
        ConfigurationError, match=r"\(from the file 'base\.safetensors'\) has the digest"
    ):
        divided(made(1), other, tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../base.safetensors", "in the data_directory"),
        ("gone.safetensors", "can't read"),
        (
            "small.safetensors",
            r"'body\.weight' has shape \(2, 2\); the model's tensor has shape \(4, 3\)",
        ),
        ("none.safetensors", r"'body\.weight' is missing"),
    ],
)
def test_base_file_incompatible_with_the_model_is_named_in_the_error(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path, made())
    write_tensors(tmp_path / "data/small.safetensors", {"body.weight": np.zeros((2, 2))})
    write_tensors(tmp_path / "data/none.safetensors", {"a": np.zeros(2)})
    with pytest.raises(ConfigurationError, match=why):
        divided(made(), table(base=name), tmp_path / "data")
    with pytest.raises(ConfigurationError, match="in the data_directory"):
        divided(made(), table(base="base.safetensors"), None)


def test_pattern_that_matches_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no tensor's name matches 'heads\.\*'"):
        divided(made(), table(trainable=["head.*", "heads.*"]), None)


def test_tied_tensors_must_be_all_trainable_or_all_in_the_base() -> None:
    network = made()
    network.twin = nn.Linear(4, 2)
    network.twin.weight = network.head.weight
    with pytest.raises(ConfigurationError, match="share their memory"):
        divided(network, table(), None)
    parts = divided(network, table(trainable=["head.*", "twin.*"]), None)
    assert "twin.weight" in parts.layout.by_name


def keeping(*patterns: str, **values: object) -> ModelTable:
    return ModelTable.model_validate({"keep": patterns, **values})


def test_kept_tensors_are_trained_and_not_sent() -> None:
    parts = divided(made(), keeping("norm.*", "head.bias"), None)
    assert list(parts.layout.by_name) == ["body.weight", "body.bias", "head.weight"]
    assert list(parts.arrays()) == list(parts.layout.by_name)
    assert [name.partition(".")[0] for name in parts.kept_arrays()] == ["norm"] * 5 + ["head"]
    assert all(parameter.requires_grad for parameter in parts.network.parameters())
    assert parts.base_blake3 == ""


def test_tensors_neither_trainable_nor_kept_are_the_base() -> None:
    parts = divided(made(), table(trainable=["body.*"], keep=["head.*"]), None)
    assert list(parts.layout.by_name) == ["body.weight", "body.bias"]
    assert list(parts.kept_arrays()) == ["head.weight", "head.bias"]
    trained = [name for name, each in parts.network.named_parameters() if each.requires_grad]
    assert trained == ["body.weight", "body.bias", "head.weight", "head.bias"]
    with torch.no_grad():
        parts.network.get_parameter("head.bias").add_(1)
    parts.check_base()
    with torch.no_grad():
        parts.network.get_parameter("norm.bias").add_(1)
    with pytest.raises(LayoutError):
        parts.check_base()


def test_kept_tensors_of_one_client_do_not_remain_for_the_next() -> None:
    parts = divided(made(), keeping("head.*"), None)
    first = {name: array.copy() for name, array in parts.kept_arrays().items()}
    model = {name: array.copy() for name, array in parts.arrays().items()}
    own = {name: np.full_like(array, 7.0) for name, array in first.items()}
    parts.load(model, own)
    assert all((array == 7).all() for array in parts.kept_arrays().values())
    parts.load(model)
    assert all(np.array_equal(array, first[n]) for n, array in parts.kept_arrays().items())
    with pytest.raises(LayoutError, match=r"lacks tensor 'head\.bias'"):
        parts.load(model, {"head.weight": own["head.weight"]})
    with pytest.raises(LayoutError, match=r"'head\.bias' is not in"):
        parts.load({**model, "head.bias": own["head.bias"]})


def test_some_tensors_of_a_model_of_named_arrays_can_be_kept() -> None:
    network = {"slope": np.ones(3, np.float32), "offset": np.zeros((), np.float32)}
    parts = divided(network, keeping("off*"), None)
    assert (list(parts.arrays()), list(parts.kept_arrays())) == (["slope"], ["offset"])
    parts.load({"slope": np.full(3, 2, np.float32)}, {"offset": np.array(5, np.float32)})
    assert [float(array.max()) for array in network.values()] == [2, 5]
    network["spare"] = np.zeros(1, np.float32)
    assert "spare" in parts.arrays(), "so that it is found"
    del network["offset"]
    with pytest.raises(LayoutError, match="lacks tensor 'offset'"):
        parts.kept_arrays()


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"keep": ["heads.*"]}, r"no tensor's name matches 'heads\.\*' of `keep`"),
        ({"keep": ["*"]}, "`keep` matches all tensors"),
        (
            {"keep": ["head.bias"], "trainable": ["head.*"]},
            r"tensor 'head\.bias' matches both `trainable` \(is sent\) and `keep`",
        ),
    ],
)
def test_keep_pattern_that_clients_can_not_use_is_refused_with_the_reason(
    values: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        divided(made(), ModelTable.model_validate(values), None)


def test_tied_tensors_must_be_all_kept_or_none() -> None:
    network = made()
    network.twin = nn.Linear(4, 2)
    network.twin.weight = network.head.weight
    with pytest.raises(ConfigurationError, match="only one matches `keep`"):
        divided(network, keeping("head.*"), None)
    assert "body.bias" in divided(network, keeping("head.*", "twin.*"), None).layout.by_name


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"keep_seed": 3}, "only used with `keep`"),
        ({"classes": 3}, "is an option of a model"),
        ({"base": "a.safetensors"}, "only used with `trainable`"),
        ({"trainable": [""]}, "at least 1 character"),
        ({"base_blake3": "xyz", "trainable": ["a"]}, "pattern"),
    ],
)
def test_invalid_model_table_is_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ModelTable.model_validate(values)
