"""Our optimiser takes the steps that torch's takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from potluck.client.optimizers import StochasticGradientDescent


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_steps_are_those_of_torch(momentum: float, weight_decay: float) -> None:
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


def test_parameters_without_a_gradient_stay() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = StochasticGradientDescent((used, unused), learning_rate=0.5, momentum=0.9)
    torch.autograd.backward(used.sum())
    optimizer.step()
    assert used.tolist() == [0.5, 0.5]
    assert unused.tolist() == [1.0, 1.0]
