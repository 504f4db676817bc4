"""A script's transformers.Trainer trains and measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapted_training import check_manners, measured_by, settings_of, trained
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer

from potluck.common.errors import TrainingError
from potluck.common.trainer import SHARE, Measure
from potluck.integrations.adapters.transformers import TransformersTrainer

MEASURES = {
    "accuracy": Measure(label="accuracy", unit=SHARE, higher_is_better=True),
    "loss": Measure(label="loss", lowest=0),
}


class Words(Dataset[dict[str, Any]]):
    """Samples of eight token ids each; the label is 1 if the first id is in the lower half."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.words = torch.randint(0, 20, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self.words[index]
        return {"input_ids": words, "labels": int(words[0] < 10)}


def new_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=20,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=8,
            )
        )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def make(model: Any, arguments: Any, train: Any, held_out: Any) -> Any:
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        compute_metrics=accuracy,
    )


def test_transformers_trainer_trains_and_evaluates() -> None:
    trainer, model = TransformersTrainer(make, MEASURES), new_model()
    settings = settings_of(learning_rate=0.006, epochs=6, batch_size=16)
    contribution, after = trained(trainer, model, Words(128), settings)
    assert (contribution.samples, contribution.steps) == (128, 48)
    assert contribution.measures["loss"].count == 6 * 128
    before = measured_by(trainer, model, Words(50))
    assert {name: each.count for name, each in before.items()} == {"accuracy": 50, "loss": 50}
    found = measured_by(trainer, after, Words(50))
    assert found["accuracy"].mean > 0.95 > before["accuracy"].mean
    assert found["loss"].mean < 0.5 * before["loss"].mean


def test_script_arguments_override_run_settings() -> None:
    trainer = TransformersTrainer(make, MEASURES, num_train_epochs=1, gradient_accumulation_steps=2)
    contribution, _ = trained(trainer, new_model(), Words(32), settings_of(epochs=3, batch_size=4))
    assert contribution.steps == 4
    by_steps, _ = trained(
        TransformersTrainer(make, MEASURES), new_model(), Words(32), settings_of(steps=3)
    )
    assert by_steps.steps == 3


def test_transformers_trainer_is_reproducible_cancellable_and_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(learning_rate=0.01, batch_size=8)
    trainer = TransformersTrainer(make, MEASURES)
    check_manners(trainer, new_model(), Words(32), settings, tmp_path / "here", monkeypatch)
    measured_by(trainer, new_model(), Words(8))
    assert list((tmp_path / "here").iterdir()) == []
    assert capsys.readouterr().out == ""


def test_training_on_one_gpu_of_several_is_refused() -> None:
    settings = settings_of()
    on_another = type(settings)(**{**vars(settings), "device": "cuda:1"})
    with pytest.raises(TrainingError, match="start a host for each GPU"):
        trained(TransformersTrainer(make, MEASURES), new_model(), Words(8), on_another)
