"""Trainers made from the training loop of a script."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
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
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from potluck.common.errors import ConfigurationError, RoundClosedError, TrainingError
from potluck.common.trainer import Measure, Measured, TrainerSettings, TrainingProgress
from potluck.integrations.adapters.loops import LoopTrainer

MEASURES = {"error": Measure(label="squared error", lowest=0)}


def samples(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))


def fit(model: nn.Module, loader: Any, settings: TrainerSettings) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    total = 0.0
    for _ in range(settings.training.epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total / (settings.training.epochs * len(loader))


def error_of(model: nn.Module, loader: Any) -> float:
    with torch.no_grad():
        errors = [(model(inputs) - targets).square().mean() for inputs, targets in loader]
    return float(torch.stack(errors).mean())


def new_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 1)


def test_loop_trainer_trains_and_evaluates_with_the_given_functions() -> None:
    trainer, model = LoopTrainer(fit, error_of, MEASURES), new_model()
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    contribution, after = trained(trainer, model, loader, settings_of(epochs=3))
    assert (contribution.samples, contribution.steps) == (20, 15)
    assert contribution.measures["error"].count == 20
    held_out = DataLoader(samples(), batch_size=5)
    before = measured_by(trainer, model, held_out)["error"]
    assert before == Measured(error_of(model, held_out) * 20, 20)
    assert measured_by(trainer, after, held_out)["error"].mean < 0.5 * before.mean


@pytest.mark.parametrize("own_generator", [False, True])
def test_loop_trainer_reports_progress_repeats_itself_and_can_be_cancelled(
    own_generator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(9) if own_generator else None
    loader = DataLoader(samples(), batch_size=4, shuffle=True, generator=generator)
    trainer = LoopTrainer(fit, error_of, MEASURES)
    check_manners(
        trainer, new_model(), loader, settings_of(epochs=2), tmp_path / "here", monkeypatch
    )


class Stream(IterableDataset[Any]):
    """A loader without a length."""

    def __iter__(self) -> Any:
        return iter(samples(10))


def test_samples_of_a_stream_are_counted_while_it_is_read() -> None:
    loader = DataLoader(Stream(), batch_size=4)

    def fit_stream(model: nn.Module, loader: Any, settings: TrainerSettings) -> None:
        for _ in range(2):
            for _batch in loader:
                pass

    trainer = LoopTrainer(fit_stream, lambda model, loader: 0.5, MEASURES)
    contribution, _ = trained(trainer, new_model(), loader, settings_of(epochs=2))
    assert (contribution.samples, contribution.steps) == (10, 6)
    with pytest.raises(TrainingError, match=r"return Measured\(sum, count\)"):
        measured_by(trainer, new_model(), loader)


def test_watched_loader_has_the_attributes_of_the_loader() -> None:
    loader = DataLoader(samples(), batch_size=4)
    seen: list[Any] = []

    def look(model: nn.Module, watched: Any, settings: TrainerSettings) -> None:
        seen.extend((len(watched), watched.batch_size, watched.dataset))
        list(watched)

    trained(LoopTrainer(look, error_of, MEASURES), new_model(), loader, settings_of())
    assert seen == [5, 4, loader.dataset]


TWO = {**MEASURES, "loss": Measure(label="loss")}


@pytest.mark.parametrize(
    ("returned", "measures", "line"),
    [
        (
            0.5,
            TWO,
            'returned a number; return a dict of all metrics: {"error": …, "loss": …}',
        ),
        (
            (0.5, 1),
            TWO,
            "returned a tuple of 2 values; return a dict of all metrics: ",
        ),
        (
            [0.5],
            MEASURES,
            'returned a list of 1 values; return a dict of all metrics: {"error": …}',
        ),
        ({"error": (3.0, 4)}, MEASURES, "returned a tuple for metric 'error'; return a number, or"),
        (torch.zeros(2), MEASURES, "returned a Tensor for metric 'error'; return a number, or"),
    ],
)
def test_invalid_metric_is_refused_naming_its_function(
    returned: Any, measures: dict[str, Measure], line: str
) -> None:
    def score(model: nn.Module, loader: Any) -> Any:
        return returned

    name = "test_invalid_metric_is_refused_naming_its_function.<locals>.score"
    with pytest.raises(TrainingError, match=re.escape(f"`{name}` {line}")):
        measured_by(
            LoopTrainer(fit, score, measures), new_model(), DataLoader(samples(), batch_size=4)
        )


def test_training_function_that_reads_no_batch_is_refused_by_name() -> None:
    def idle(model: nn.Module, loader: Any) -> None: ...

    loader = DataLoader(samples(), batch_size=4)
    with pytest.raises(
        TrainingError, match=r"idle` read no batch of its loader, and made no optimizer step"
    ):
        trained(LoopTrainer(idle, error_of, MEASURES), new_model(), loader, settings_of())


def fit_rebuilt(model: nn.Module, loader: Any, settings: TrainerSettings) -> None:
    """Train with a rebuilt data loader, as Opacus does, which samples by itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    for _ in range(settings.training.epochs):
        for _batch in DataLoader(loader.dataset, batch_size=2):
            optimizer.step()


def test_steps_on_a_rebuilt_loader_are_counted_reported_and_cancelled() -> None:
    trainer = LoopTrainer(fit_rebuilt, error_of, MEASURES)
    loader, shares = DataLoader(samples(), batch_size=4), list[float]()
    contribution, _ = trained(
        trainer, new_model(), loader, settings_of(epochs=3), TrainingProgress(shares.append)
    )
    assert (contribution.samples, contribution.steps) == (20, 30)
    assert len(shares) == 30
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    unwanted = TrainingProgress(lambda _: None, cancelled=lambda: True)
    with pytest.raises(RoundClosedError):
        trained(trainer, new_model(), loader, settings_of(), unwanted)


def test_optimizer_steps_in_another_thread_are_not_counted() -> None:
    loader = DataLoader(samples(), batch_size=4)

    def idle(model: nn.Module, watched: Any, settings: TrainerSettings) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(fit, model, loader, settings).result()

    with pytest.raises(TrainingError, match="read no batch of its loader"):
        trained(LoopTrainer(idle, error_of, MEASURES), new_model(), loader, settings_of())


def test_a_rebuilt_loader_of_a_stream_is_refused() -> None:
    trainer = LoopTrainer(fit_rebuilt, error_of, MEASURES)
    with pytest.raises(TrainingError, match="fit_rebuilt` used its own loader"):
        trained(trainer, new_model(), DataLoader(Stream(), batch_size=4), settings_of())


def test_further_function_parameters_are_filled_from_the_settings_by_name() -> None:
    seen: dict[str, Any] = {}

    def look(
        model: nn.Module, loader: Any, epochs: int, learning_rate: float = 9.0, own: int = 7
    ) -> None:
        list(loader)
        seen.update(epochs=epochs, learning_rate=learning_rate, own=own)

    def evaluate(model: nn.Module, loader: Any, device: str) -> float:
        seen["device"] = device
        return 0.5

    loader = DataLoader(samples(), batch_size=4)
    trainer = LoopTrainer(look, evaluate, MEASURES)
    trained(trainer, new_model(), loader, settings_of(epochs=3, learning_rate=0.25))
    measured_by(trainer, new_model(), loader)
    assert seen == {"epochs": 3, "learning_rate": 0.25, "own": 7, "device": "cpu"}

    def unknown(model: nn.Module, loader: Any, epoch: int) -> None: ...

    with pytest.raises(
        TrainingError, match=r"'epoch', for which Potluck has no value; .* epochs, "
    ):
        trained(LoopTrainer(unknown, evaluate, MEASURES), new_model(), loader, settings_of())


def private_fit(model: nn.Module, loader: Any, settings: TrainerSettings) -> None:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    with settings.noisy_steps(model, optimizer, loader) as (optimizer, loader):
        for _ in range(settings.training.epochs):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def test_private_training_function_takes_the_granted_noisy_steps() -> None:
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    trainer = LoopTrainer(private_fit, error_of, MEASURES, private=True)
    check_private_training(trainer, new_model(), loader)
    contribution, _ = trained(trainer, new_model(), loader, settings_of(epochs=3))
    assert contribution.steps == 15, "without terms the loop is the plain one"


def test_private_training_function_without_a_settings_parameter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`error_of` is declared private, but has no para"):
        LoopTrainer(error_of, error_of, MEASURES, private=True)
