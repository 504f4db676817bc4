"""Trainers of libraries, and selectors' questions, on a device."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import lightning
import pytest
import torch
from support.adapted_training import settings_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from potluck.client.question import Question, QuestionContext
from potluck.client.training.questions.gradient_norm import GradientNorm
from potluck.client.training.questions.loss import Loss
from potluck.client.training.questions.soft_label import SoftLabel
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples
from potluck.common.trainer import Measure, TrainingProgress
from potluck.integrations.adapters.lightning import LightningTrainer


def blobs(samples: int = 600) -> Examples:
    """Return two clouds of points, one per class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    inputs = torch.randn(samples, 4, generator=generator) + 2.0 * labels[:, None]
    return Examples(inputs=inputs, labels=labels)


@pytest.mark.parametrize("question", [Loss(), GradientNorm(), SoftLabel()])
@pytest.mark.parametrize("stay", [False, True], ids=["samples here", "samples there"])
def test_question_answer_on_the_device_equals_that_on_the_cpu(
    device: str, question: Question, stay: bool
) -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)), blobs()
    here = QuestionContext(
        client=ClientId("a"),
        round=1,
        data=ClientData(train=data),
        classes=2,
        groups=0,
        device=torch.device("cpu"),
        model=model,
    )
    expected = question.answer(here)
    where = torch.device(device)
    there = replace(
        here,
        device=where,
        model=copy.deepcopy(model),
        data=ClientData(train=data.to(where) if stay else data),
    )
    assert question.answer(there) == pytest.approx(expected, rel=1e-4)


class Line(lightning.LightningModule):  # type: ignore[misc]  # its library is not read
    """A linear model that records the device on which it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.met: set[str] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        self.met.add(inputs.device.type)
        return nn.functional.mse_loss(self.layer(inputs)[:, 0], targets)

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("error", (self.layer(inputs)[:, 0] - targets).abs().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_lightning_trains_on_the_device_of_the_host(device: str) -> None:
    data = blobs(64)
    loader = DataLoader(TensorDataset(data.inputs, data.labels.float()), batch_size=8)

    def weights(where: str) -> tuple[set[str], torch.Tensor]:
        torch.manual_seed(0)
        model = Line().to(where)
        trainer = LightningTrainer({"error": Measure(label="error", lowest=0)})
        settings = replace(settings_of(epochs=2), device=where)
        trainer.train(model, loader, settings, TrainingProgress())
        return model.met, model.layer.weight.detach().cpu()

    met, found = weights(device)
    assert met == {torch.device(device).type}
    torch.testing.assert_close(found, weights("cpu")[1], rtol=1e-3, atol=1e-4)
