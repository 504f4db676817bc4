"""The project's optimizers take the same steps as those of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from potluck.common.learning.optimizers import StochasticGradientDescent, make_optimizer
from potluck.common.settings.local_training import LocalTraining


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_stochastic_gradient_descent_takes_the_steps_of_torch(
    momentum: float, weight_decay: float
) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.SGD(
        theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay
    )
    optimizer = StochasticGradientDescent(
        tuple(ours.parameters()), learning_rate=0.1, momentum=momentum, weight_decay=weight_decay
    )
    for step in range(5):
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
        optimizer.clear_gradients()
        torch.autograd.backward(ours(inputs).square().sum())
        optimizer.step()
        reference.zero_grad()
        torch.autograd.backward(theirs(inputs).square().sum())
        reference.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_optimizer_takes_the_steps_of_torch_also_after_a_restart(
    optimizer: str, weight_decay: float
) -> None:
    """Two trainings are compared: after a restart, no state of the first one is left."""
    settings = LocalTraining.model_validate(
        {
            "optimizer": optimizer,
            "learning_rate": 0.05,
            "learning_rate_decay": 0.5,
            "momentum": 0.9,
            "weight_decay": weight_decay,
            "betas": (0.8, 0.95),
            "epsilon": 1e-6,
        }
    )
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    mine = make_optimizer(tuple(ours.parameters()), settings, round_number=1)
    for round_number in (1, 2):
        rate = settings.learning_rate_in(round_number)
        mine.restart(rate)
        assert mine.learning_rate == rate == 0.05 * 0.5 ** (round_number - 1)
        parameters = list(theirs.parameters())
        reference: torch.optim.Optimizer
        if optimizer == "sgd":
            reference = torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=weight_decay)
        else:
            kind = torch.optim.Adam if optimizer == "adam" else torch.optim.AdamW
            reference = kind(
                parameters, rate, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay
            )
        for step in range(4):
            inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
            mine.clear_gradients()
            torch.autograd.backward(ours(inputs).square().sum())
            mine.step()
            reference.zero_grad()
            torch.autograd.backward(theirs(inputs).square().sum())
            reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rounds", "rates"),
    [
        ((), [1.0, 0.1, 0.01, 0.001]),
        ((2,), [1.0, 1.0, 0.1, 0.1]),
        ((1, 3), [1.0, 0.1, 0.1, 0.01]),
    ],
)
def test_learning_rate_decays_after_the_configured_number_of_rounds(
    rounds: tuple[int, ...], rates: list[float]
) -> None:
    settings = LocalTraining(
        learning_rate=1.0, learning_rate_decay=0.1, learning_rate_decay_rounds=rounds
    )
    assert [settings.learning_rate_in(n) for n in (1, 2, 3, 4)] == pytest.approx(rates)


COMPILER = """
import sys
from torch import nn
from potluck.common.learning.optimizers import make_optimizer
from potluck.common.settings.local_training import LocalTraining
for name in ("sgd", "adam", "adamw"):
    layer = nn.Linear(2, 1)
    optimizer = make_optimizer(
        tuple(layer.parameters()), LocalTraining(optimizer=name), round_number=1
    )
    layer.weight.sum().backward()
    optimizer.step()
print("torch._dynamo" in sys.modules)
"""


def test_optimizers_do_not_import_the_torch_compiler() -> None:
    """Importing the compiler takes seconds on every host."""
    command = [sys.executable, "-c", COMPILER]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"


def test_parameters_without_a_gradient_are_unchanged() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = StochasticGradientDescent((used, unused), learning_rate=0.5, momentum=0.9)
    torch.autograd.backward(used.sum())
    optimizer.step()
    assert used.tolist() == [0.5, 0.5]
    assert unused.tolist() == [1.0, 1.0]
