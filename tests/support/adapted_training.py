"""Checks of an adapter's trainer, which is called as a host calls it. They detect side effects."""

from __future__ import annotations

import copy
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.common.errors import RoundClosedError
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.trainer import (
    Capability,
    Contribution,
    EvaluationSettings,
    Measures,
    PrivateTraining,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)
from potluck.privacy.host.noisy_steps import noisy_steps


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


def check_private_training(trainer: Trainer, model: nn.Module, data: Any) -> None:
    """Check that a trainer takes exactly the granted steps, all with noise, also in empty batches,
    and moves the model with them."""
    assert Capability.PRIVACY in trainer.capabilities
    samples = trainer.samples(data)
    terms = PrivateTraining(
        sampling_rate=2 / samples,
        noise_multiplier=1.0,
        steps=30,
        clip=1.0,
        expected_batch=2.0,
        engine=noisy_steps,
    )
    settings = replace(settings_of(epochs=7), privacy=terms)
    shares: list[float] = []
    contribution, after = trained(trainer, model, data, settings, TrainingProgress(shares.append))
    assert terms.within_terms
    assert sum(each.steps for each in terms.taken) == 30
    assert contribution.samples == samples
    assert 2 < len(shares) <= 31
    for name, tensor in after.named_parameters():
        assert not torch.equal(tensor, model.get_parameter(name))


def refuse(*_: object) -> None:
    raise AssertionError("a connection was begun")
