"""The kept tensors of a client are trained first, then the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from potluck.client.objective import Batch, LocalContext, Objective
from potluck.client.training.steps.in_turn import train_in_turn
from potluck.client.training.steps.loop import TrainingContext
from potluck.common.errors import ConfigurationError
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples

SETTINGS = LocalTraining(epochs=2, kept_epochs=1, batch_size=5, learning_rate=0.1, momentum=0.5)


@dataclass
class Watched(Objective):
    """Cross-entropy that records which tensors change between two steps."""

    model: nn.Module
    steps: list[dict[str, Tensor]] = field(default_factory=list)

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        self._note()
        return nn.functional.cross_entropy(logits, batch.labels)

    def moved(self) -> list[set[str]]:
        self._note()
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [{n for n in a if not torch.equal(a[n], b[n])} for a, b in pairs]

    def _note(self) -> None:
        self.steps.append({n: t.detach().clone() for n, t in self.model.named_parameters()})


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def examples() -> Examples:
    inputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
    return Examples(inputs=inputs, labels=(inputs[:, 0] > 0).long())


def context(shares: list[float]) -> TrainingContext:
    return TrainingContext(
        classes=2, seed=3, round=1, device=torch.device("cpu"), progress=shares.append
    )


def test_kept_tensors_and_other_tensors_are_trained_in_turn() -> None:
    model, shares = network(), list[float]()
    watched = Watched(model)
    result = train_in_turn(
        model, {"2.weight", "2.bias"}, examples(), watched, SETTINGS, context(shares)
    )
    head, body = {"2.weight", "2.bias"}, {"0.weight", "0.bias"}
    assert watched.moved() == [head] * 2 + [body] * 4
    assert result.steps == 4, "those of what travels"
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_training_in_turn_is_reproducible() -> None:
    models = [network(), network()]
    for model in models:
        train_in_turn(model, {"2.bias"}, examples(), Watched(model), SETTINGS, context([]))
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kept", [set[str](), {"0.weight", "0.bias", "2.weight", "2.bias"}])
def test_training_in_turn_without_parameters_in_one_part_is_refused(kept: set[str]) -> None:
    model = network()
    with pytest.raises(
        ConfigurationError, match="parameters that clients keep and parameters that they send"
    ):
        train_in_turn(model, kept, examples(), Watched(model), SETTINGS, context([]))
    assert all(parameter.requires_grad for parameter in model.parameters())
