"""Parameter counts of the models compared with published ones, and custom models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.learning.task_loading import make_task, model_maker
from potluck.common.settings.plugins import MODELS, installed
from potluck.experiments.models.resnet import resnet18_gn

PUBLISHED = {
    "perceptron": (4_352, (54,), 2),
    "mnist-cnn": (1_663_370, (1, 28, 28), 10),
    "lenet5": (62_006, (3, 32, 32), 10),
    "resnet10-gn": (5_418_792, (3, 64, 64), 1000),
    "resnet12-gn": (5_492_776, (3, 64, 64), 1000),
    "resnet18-gn": (11_689_512, (3, 64, 64), 1000),
    "resnet50-gn": (25_557_032, (3, 64, 64), 1000),
    "mobilenetv2-gn": (3_504_872, (3, 64, 64), 1000),
}


def test_published_parameter_counts_cover_all_installed_models() -> None:
    others = {"concatenation", "ensemble", "low-rank"}  # composed models; tested elsewhere
    assert set(installed(MODELS)) == set(PUBLISHED) | others


def test_shorter_resnets_have_fewer_parameters_by_whole_blocks() -> None:
    """A block of two 3 × 3 convolutions that keeps its w channels has 18w² + 4w parameters."""
    blocks = {width: 18 * width**2 + 4 * width for width in (64, 128, 256, 512)}
    assert PUBLISHED["resnet10-gn"][0] == PUBLISHED["resnet18-gn"][0] - sum(blocks.values())
    assert PUBLISHED["resnet12-gn"][0] == PUBLISHED["resnet10-gn"][0] + blocks[64]


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_has_the_published_number_of_parameters(name: str) -> None:
    parameters, shape, classes = PUBLISHED[name]
    model = model_maker(name, {})()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert [*model.buffers()] == [], "running statistics don't average"
    with torch.inference_mode():
        assert model.eval()(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", ["resnet18-gn", "mobilenetv2-gn"])
def test_every_model_parameter_has_a_finite_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = model_maker(name, {"classes": 3})()
    torch.autograd.backward(model(torch.randn(2, 3, 32, 32)).square().sum())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_resnet_for_small_images_has_a_smaller_stem() -> None:
    model = resnet18_gn(classes=10, small_images=True)
    # The variant for CIFAR-10, with a 3 × 3 stem and ten classes, whose count is published.
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    with torch.inference_mode():
        assert model.stages(model.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 512, 4, 4)


# Models of one's own -----------------------------------------------------------------------------

OWN = """
from os import system
from torch import nn

def tiny(width: int = 3, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width, bias=bias), nn.Linear(width, 10))

class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

def nothing() -> int:
    return 3

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    (tmp_path / "potluck_own_models.py").write_text(OWN)
    sys.path.insert(0, str(tmp_path))
    yield ("potluck_own_models",)
    sys.path.remove(str(tmp_path))
    sys.modules.pop("potluck_own_models", None)


def test_callable_of_an_allowed_module_creates_a_model(own_module: tuple[str, ...]) -> None:
    made = model_maker("potluck_own_models:tiny", {"width": 5}, own_module)()
    assert isinstance(made, nn.Sequential)
    task = make_task(
        "digits",
        {"clients": 3},
        model={"name": "potluck_own_models:Net"},
        model_modules=own_module,
    )
    assert type(task.model()).__name__ == "Net"
    assert (task.classes, task.groups) == (10, 0)
    assert getattr(task, "training", None), "what the task recommends still holds"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "os:system",
            {"command": "true"},
            "`model_modules` of this machine's configuration does not list",
        ),
        (
            "potluck_own_models_too:x",
            {},
            "`model_modules` of this machine's configuration does not list",
        ),
        (
            "potluck_own_models:system",
            {},
            "can't be made with these options|is not a function or class",
        ),
        ("potluck_own_models:system", {"command": "true"}, "is not a function or class"),
        ("potluck_own_models:absent", {}, "is not installed on this machine"),
        ("potluck_own_models:number", {}, "is not a function or class"),
        ("potluck_own_models:tiny", {"depth": 3}, "can't be made with these options.*depth"),
        ("potluck_own_models:tiny", {"width": "x"}, "can't be made: "),
        ("potluck_own_models:nothing", {}, "creates an object of the class int"),
        (
            "lenet7",
            {},
            r"potluck.models: 'lenet7' is not installed \(did you mean 'lenet5'\?\); installed: co",
        ),
    ],
)
def test_callable_that_does_not_create_a_model_is_refused(
    own_module: tuple[str, ...], name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        model_maker(name, options, own_module)()


def test_torchvision_model_is_refused_unless_the_owner_lists_the_module() -> None:
    with pytest.raises(
        PluginError, match="`model_modules` of this machine's configuration does not list"
    ):
        model_maker("torchvision.models:resnet18", {"weights": "DEFAULT"})


def test_model_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the table of the model has no `name`"):
        make_task("digits", {}, model={"classes": 3})
