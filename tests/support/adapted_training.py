"""An adapter's trainer, used as a host uses it; what it does beside training is noticed."""

from __future__ import annotations

import copy
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.common.errors import RoundClosedError
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measures,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)


def settings_of(seed: int = 3, **training: Any) -> TrainerSettings:
    return TrainerSettings(
        training=LocalTraining(**training), round=1, seed=seed, client=ClientId("client-0")
    )


def trained(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    settings: TrainerSettings,
    report: TrainingProgress | None = None,
) -> tuple[Contribution, nn.Module]:
    """Train a copy of the model; return the contribution and the copy."""
    model = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        contribution = trainer.train(model, data, settings, report or TrainingProgress())
    return contribution, model


def measured_by(trainer: Trainer, model: nn.Module, data: Any) -> Measures:
    return trainer.evaluate(model, data, EvaluationSettings(seed=5, client=ClientId("client-0")))


def weights_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def check_manners(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    settings: TrainerSettings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a trainer reports progress, repeats itself, stops when cancelled, writes no files
    to the working directory and opens no connections."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    shares: list[float] = []
    first, trained_once = trained(trainer, model, data, settings, TrainingProgress(shares.append))
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] < 1
    other = TrainerSettings(**{**vars(settings), "seed": settings.seed + 1})
    _, trained_otherwise = trained(trainer, model, data, other)
    again, trained_again = trained(trainer, model, data, settings)
    assert again == first
    assert weights_of(trained_again) == weights_of(trained_once)
    assert weights_of(trained_otherwise) != weights_of(trained_once)

    steps: list[float] = []
    unwanted = TrainingProgress(steps.append, cancelled=lambda: len(steps) == 2)
    with pytest.raises(RoundClosedError):
        trained(trainer, model, data, settings, unwanted)
    assert len(steps) == 2
    assert list(folder.iterdir()) == []


def refuse(*_: object) -> None:
    raise AssertionError("a connection was begun")
