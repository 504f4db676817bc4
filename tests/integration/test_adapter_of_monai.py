"""MONAI's transforms, metrics and engines as a trainer uses them.

MONAI is imported by the tests, not by this file: each pytest worker imports all test files.
"""
# MONAI's stubs export nothing from its packages and take less than its functions do.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportOptionalIterable=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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

from potluck.common.errors import ConfigurationError
from potluck.common.trainer import SHARE, Measure, Measured, TrainerSettings

KINDS = ("loop", "engine")
MEASURES = {
    "dice": Measure(label="Dice", unit=SHARE, higher_is_better=True),
    "loss": Measure(label="Dice loss", unit=SHARE),
}


def slices(count: int) -> list[dict[str, Any]]:
    """Return images with bright squares on noise; the last one has no square."""
    generator = np.random.default_rng(count)
    made = []
    for number in range(count):
        label = np.zeros((1, 16, 16), np.float32)
        if number < count - 1:
            y, x = generator.integers(2, 8, 2)
            label[0, y : y + 6, x : x + 6] = 1
        noise = generator.normal(0, 0.3, label.shape).astype(np.float32)
        made.append({"image": label + noise, "label": label})
    return made


def loader(count: int, *, train: bool) -> Any:
    from monai.data import DataLoader, Dataset
    from monai.transforms import Compose, RandGaussianNoised, ToTensord

    noise = [RandGaussianNoised("image", prob=1.0, std=0.1)] if train else []
    dataset = Dataset(slices(count), Compose([ToTensord(["image", "label"]), *noise]))
    return DataLoader(dataset, batch_size=4, shuffle=train)


def new_model() -> nn.Module:
    from monai.networks.nets import UNet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net: nn.Module = UNet(
            spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,)
        )
        return net


def fit(model: nn.Module, batches: Any, settings: TrainerSettings) -> dict[str, float]:
    from monai.losses import DiceLoss

    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    loss_function, total = DiceLoss(sigmoid=True), 0.0
    for _ in range(settings.training.epochs):
        for batch in batches:
            loss = loss_function(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch["image"])
    return {"loss": total / (settings.training.epochs * len(batches.dataset))}


def measure(model: nn.Module, batches: Any) -> dict[str, Measured]:
    from monai.data import decollate_batch
    from monai.metrics import DiceMetric
    from monai.transforms import AsDiscrete

    from potluck.integrations.adapters.monai import measured

    metric = DiceMetric(ignore_empty=True)
    discrete = AsDiscrete(threshold=0.5)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            outputs = [discrete(each.sigmoid()) for each in decollate_batch(model(batch["image"]))]
            metric(outputs, decollate_batch(batch["label"]))
    return {"dice": measured(metric)}


def engine(model: nn.Module, batches: Any, settings: TrainerSettings) -> Any:
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss

    return SupervisedTrainer(
        device=torch.device(settings.device),
        max_epochs=settings.training.epochs,
        train_data_loader=batches,
        network=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
        loss_function=DiceLoss(sigmoid=True),
    )


def evaluator(model: nn.Module, batches: Any) -> Any:
    from monai.engines import SupervisedEvaluator
    from monai.handlers import MeanDice, from_engine
    from monai.transforms import Compose

    return SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=batches,
        network=model,
        postprocessing=Compose([nn.Sequential(), Squashed()]),
        key_val_metric={"dice": MeanDice(output_transform=from_engine(["pred", "label"]))},
    )


class Squashed:
    """Transform of logits into 0 or 1; the threshold is a probability of one half."""

    def __call__(self, data: dict[str, Any]) -> Any:
        from monai.transforms import AsDiscreted

        data = {**data, "pred": data["pred"].sigmoid()}
        return AsDiscreted("pred", threshold=0.5)(data)


def trainer_of(kind: str) -> Any:
    from potluck.integrations.adapters.monai import MonaiEngineTrainer, MonaiLoopTrainer

    if kind == "loop":
        return MonaiLoopTrainer(fit, measure, MEASURES)
    return MonaiEngineTrainer(engine, evaluator, MEASURES)


def private_trainer(engine_of: Any) -> Any:
    from potluck.integrations.adapters.monai import MonaiEngineTrainer

    return MonaiEngineTrainer(engine_of, evaluator, MEASURES, private=True)


def private_batches() -> Any:
    from monai.data import DataLoader, Dataset
    from monai.transforms import ToTensord

    return DataLoader(Dataset(slices(22), ToTensord(("image", "label"))), batch_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_monai_trainer_trains_and_evaluates_on_images(kind: str) -> None:
    trainer, model = trainer_of(kind), new_model()
    settings = settings_of(learning_rate=0.02, epochs=6)
    contribution, after = trained(trainer, model, loader(12, train=True), settings)
    assert (contribution.samples, contribution.steps) == (12, 18)
    assert 0 < contribution.measures["loss"].mean < 1
    before = measured_by(trainer, model, loader(9, train=False))["dice"]
    assert before.count == 8  # one image lacks the class
    assert measured_by(trainer, after, loader(9, train=False))["dice"].mean > max(0.6, before.mean)


def test_loop_and_engine_trainers_give_the_same_model_and_metric() -> None:
    settings = settings_of(learning_rate=0.02, epochs=2)
    ways = [
        trained(trainer_of(kind), new_model(), loader(12, train=True), settings)[1]
        for kind in KINDS
    ]
    for one, other in zip(*(model.parameters() for model in ways), strict=True):
        torch.testing.assert_close(one, other)
    found = [
        measured_by(trainer_of(kind), ways[0], loader(9, train=False))["dice"] for kind in KINDS
    ]
    assert found[0].sum == pytest.approx(found[1].sum)
    assert found[0].count == found[1].count


def test_metric_is_averaged_over_images_with_a_value() -> None:
    from monai.metrics import DiceMetric

    from potluck.integrations.adapters.monai import measured

    metric = DiceMetric(include_background=True, reduction="mean")
    generator = torch.Generator().manual_seed(4)
    ours, theirs = (torch.randint(0, 2, (5, 3, 8, 8), generator=generator) for _ in range(2))
    theirs[0, 1] = 0  # that image lacks the class
    theirs[1] = 0
    metric(ours, theirs)
    expected = metric.aggregate().item()
    assert measured(metric).count == 4
    assert measured(metric).mean == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_monai_trainer_is_reproducible_cancellable_and_isolated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(learning_rate=0.02, epochs=2)
    batches = loader(12, train=True)
    check_manners(trainer_of(kind), new_model(), batches, settings, tmp_path / "here", monkeypatch)


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))


def test_private_monai_training_takes_the_granted_noisy_steps() -> None:
    check_private_training(private_trainer(engine), small(), private_batches())


def mixed(model: nn.Module, batches: Any, settings: TrainerSettings) -> Any:
    made = engine(model, batches, settings)
    made.amp = True
    return made


def test_private_engine_that_can_skip_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="plain SupervisedTrainer: remove amp"):
        check_private_training(private_trainer(mixed), small(), private_batches())
