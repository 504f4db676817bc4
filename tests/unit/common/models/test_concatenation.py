"""Several models side by side: which part answers, and which is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from potluck.common.errors import ConfigurationError
from potluck.common.learning.task_loading import model_maker
from potluck.common.models.concatenation import Concatenation, concatenation

PERCEPTRON = {"name": "perceptron", "inputs": 4, "hidden": [5], "classes": 3, "dropout": 0.5}
INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network(groups: int = 3) -> Concatenation:
    torch.manual_seed(1)
    return concatenation(of=PERCEPTRON, groups=groups)


def moved_by(part: int) -> set[str]:
    """Train a part; return the first components of the names of tensors that got gradients."""
    made = network()
    made.use_part(part)
    made.train()
    made(INPUTS).sum().backward()
    return {
        ".".join(name.split(".")[:2]) if "." in name else name
        for name, each in made.named_parameters()
        if each.grad is not None and bool(each.grad.any())
    }


def test_group_part_trains_its_own_encoder_and_the_last_part_trains_the_head() -> None:
    assert moved_by(1) == {"encoders.1", "heads.1"}
    assert moved_by(3) == {"head.weight", "head.bias"}


def test_encoders_are_in_evaluation_mode_while_the_head_is_trained() -> None:
    made = network()
    made.use_part(3)
    made.train()
    assert torch.equal(made(INPUTS), made(INPUTS)), "dropout is off"
    made.use_part(0)
    made.train()
    assert not torch.equal(made(INPUTS), made(INPUTS))


def test_concatenation_outputs_the_mean_until_the_head_is_in_use() -> None:
    made = network().eval()
    each = []
    for part in range(3):
        made.use_part(part)
        each.append(made(INPUTS))
    made.use_part(3)
    head = made(INPUTS)
    made.use_part(None)
    torch.testing.assert_close(made(INPUTS), torch.stack(each).mean(dim=0))
    made.joined.fill_(1)
    assert torch.equal(made(INPUTS), head)
    assert head.shape == (6, 3)


@pytest.mark.parametrize("name", ["lenet5", "mnist-cnn"])
def test_built_in_models_can_be_concatenated(name: str) -> None:
    of = {"name": name, "classes": 7} if name == "lenet5" else {"name": name}
    made = model_maker("concatenation", {"of": of, "groups": 2})()
    alone = model_maker(name, {key: value for key, value in of.items() if key != "name"})()
    assert isinstance(made, Concatenation)
    own = sum(each.numel() for each in alone.parameters())
    head = sum(each.numel() for each in made.head.parameters())
    assert sum(each.numel() for each in made.parameters()) == 2 * own + head


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({}, "it must be a table with the name of another model"),
        ({"name": "concatenation"}, "it must be a table with the name of another model"),
        ({"name": "unknown"}, "'unknown' is not installed"),
        ({"name": "perceptron", "inputs": "many"}, "model perceptron: option 'inputs'"),
    ],
)
def test_concatenation_of_invalid_models_is_refused(of: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        concatenation(of=of)


def test_concatenation_refuses_a_model_without_an_output_layer_or_an_unknown_part() -> None:
    with pytest.raises(ConfigurationError, match="the model ReLU does not end in an"):
        Concatenation([nn.ReLU()])
    with pytest.raises(
        ConfigurationError, match="the model has 3 groups, but the strategy trains part 4"
    ):
        network().use_part(4)
