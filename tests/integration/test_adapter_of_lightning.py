"""The adapter that trains and evaluates a LightningModule.

Lightning is imported by the tests, not by this file: each pytest worker imports all test files.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapted_training import (
    check_manners,
    check_private_training,
    measured_by,
    settings_of,
    trained,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.trainer import Measure

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)
MEASURES = {"error": Measure(label="mean error", lowest=0), "loss": Measure(label="loss")}


@functools.cache
def line() -> Any:
    """Return the class of a linear LightningModule."""
    import lightning

    class Line(lightning.LightningModule):  # type: ignore[misc]  # its library is not read
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.lr = 0.1

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.layer(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, targets = batch
            self.log("error", (self.layer(inputs) - targets).abs().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    return Line


def trainer_of(**options: Any) -> Any:
    """Return a LightningTrainer that reports `MEASURES`."""
    from potluck.integrations.adapters.lightning import LightningTrainer

    return LightningTrainer(MEASURES, **options)


def samples(count: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))


def new_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return line()()


def test_lightning_module_is_trained_and_evaluated() -> None:
    trainer, model = trainer_of(), new_model()
    contribution, after = trained(
        trainer, model, DataLoader(samples(), batch_size=4, shuffle=True), settings_of(epochs=3)
    )
    assert (contribution.samples, contribution.steps) == (22, 18)
    assert contribution.measures["loss"].count == 66
    inputs, targets = samples().tensors
    expected = (model.layer(inputs) - targets).abs().mean().item()
    before = measured_by(trainer, model, DataLoader(samples(), batch_size=8))
    assert list(before) == ["error"]
    assert before["error"].count == 22
    assert before["error"].mean == pytest.approx(expected, rel=1e-6)
    after_it = measured_by(trainer, after, DataLoader(samples(), batch_size=8))
    assert after_it["error"].mean < 0.5 * expected


def test_run_settings_apply_unless_the_script_sets_its_own() -> None:
    loader = DataLoader(samples(), batch_size=4)
    by_steps, _ = trained(trainer_of(), new_model(), loader, settings_of(steps=7))
    assert by_steps.steps == 7
    chosen = trainer_of(learning_rate="lr", max_epochs=1)
    contribution, model = trained(
        chosen, new_model(), loader, settings_of(epochs=5, learning_rate=0.02)
    )
    assert contribution.steps == 6
    assert model.lr == 0.02


def test_gradient_accumulation_does_not_change_the_reported_loss() -> None:
    loader = DataLoader(samples(), batch_size=4)
    still: dict[str, Any] = {"learning_rate": "lr"}
    rate = settings_of(learning_rate=1e-30)
    plain, _ = trained(trainer_of(**still), new_model(), loader, rate)
    accumulating = trainer_of(accumulate_grad_batches=3, **still)
    accumulated, _ = trained(accumulating, new_model(), loader, rate)
    assert accumulated.steps == 2
    assert accumulated.measures["loss"].mean == pytest.approx(plain.measures["loss"].mean)


def test_lightning_trainer_is_reproducible_cancellable_and_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    check_manners(
        trainer_of(),
        new_model(),
        loader,
        settings_of(epochs=2),
        tmp_path / "here",
        monkeypatch,
    )


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
def test_loader_without_batches_is_an_error() -> None:
    loader = DataLoader(samples(3), batch_size=4, drop_last=True)
    with pytest.raises(TrainingError, match="read no batch"):
        trained(trainer_of(), new_model(), loader, settings_of())


def test_module_of_another_lightning_package_is_refused_with_a_remedy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        pass

    trainer, loader = trainer_of(), DataLoader(samples(), batch_size=4)
    remedy = "model Other is a module of pytorch_lightning, .* use `import lightning` instead of"
    with pytest.raises(TrainingError, match=remedy):
        trained(trainer, Other(), loader, settings_of())
    with pytest.raises(TrainingError, match=remedy):
        measured_by(trainer, Other(), loader)
    with pytest.raises(
        TrainingError, match="model Linear is not a LightningModule; derive the model"
    ):
        measured_by(trainer, nn.Linear(3, 1), loader)


def test_private_lightning_training_takes_the_granted_noisy_steps() -> None:
    loader = DataLoader(samples(), batch_size=4)
    check_private_training(trainer_of(private=True), new_model(), loader)


@pytest.mark.parametrize("name", ["accumulate_grad_batches", "callbacks", "precision"])
def test_option_that_breaks_differential_privacy_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigurationError, match=f"option {name} is not compatible with private"):
        trainer_of(private=True, **options)


def test_private_module_with_a_scheduler_is_refused() -> None:
    class Scheduled(line()):  # type: ignore[misc]  # its library is not read
        def configure_optimizers(self) -> Any:
            return {"optimizer": super().configure_optimizers()}

    loader = DataLoader(samples(), batch_size=4)
    with pytest.raises(ConfigurationError, match="return one optimizer"):
        check_private_training(trainer_of(private=True), Scheduled(), loader)
