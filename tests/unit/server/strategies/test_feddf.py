"""FedDF's distillation, on networks small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from potluck.common.errors import TrainingError
from potluck.common.tensors.model_arrays import load_arrays, state_arrays
from potluck.server.strategies.feddf import FedDF, divergence, teacher
from potluck.server.strategy import ServerTraining

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Update:
    client: str
    arrays: Arrays

    def weights(self) -> Arrays:
        return self.arrays

    def tensor(self, name: str) -> NDArray[Any]:
        return np.asarray(self.arrays[name])

    def auxiliary(self, name: str) -> Arrays:
        raise AssertionError(name)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def training(
    student: nn.Module, updates: Sequence[Arrays], inputs: torch.Tensor, *, seed: int = 5
) -> ServerTraining:
    return ServerTraining(
        network=student,
        weights=lambda: {name: array.copy() for name, array in state_arrays(student).items()},
        load=lambda arrays: load_arrays(student, arrays),
        updates=[Update(f"client-{i}", arrays) for i, arrays in enumerate(updates)],
        inputs=inputs,
        seed=seed,
        round=1,
        progress=shares.append,
    )


shares: list[float] = []


@pytest.fixture(autouse=True)
def _no_progress_yet() -> None:
    shares.clear()


def test_teacher_is_the_softmax_of_mean_logits_not_the_mean_of_softmaxes() -> None:
    """A worked example: logits (4, 0) and (0, 2) give .7311; the mean of probabilities is .5506."""
    student = nn.Linear(1, 2)
    clients = [
        {"weight": np.zeros((2, 1), np.float32), "bias": np.array(bias, np.float32)}
        for bias in ((4, 0), (0, 2))
    ]
    found = teacher(training(student, clients, torch.zeros(3, 1)))
    assert found[:, 0].tolist() == pytest.approx([0.7311] * 3, abs=1e-4)
    probabilities = [1 / (1 + np.exp(-4)), 1 / (1 + np.exp(2))]
    assert np.mean(probabilities) == pytest.approx(0.5506, abs=1e-4)


def test_divergence_equals_that_computed_with_numpy() -> None:
    generator = np.random.default_rng(1)
    logits, other = generator.normal(size=(2, 7, 4)) * 3
    beliefs = np.exp(other) / np.exp(other).sum(axis=1, keepdims=True)
    student = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = (beliefs * (np.log(beliefs) - np.log(student))).sum(axis=1).mean()
    found = divergence(torch.from_numpy(logits), torch.from_numpy(beliefs))
    assert float(found) == pytest.approx(wanted)


def distilled(**options: Any) -> tuple[float, float, Arrays]:
    """Distil; return the divergence from the clients before and after, and the model."""
    clients = [state_arrays(network(seed)) for seed in (1, 2, 3)]
    student = network(4)
    inputs = torch.randn(400, 3, generator=torch.Generator().manual_seed(2))
    lesson = training(student, clients, inputs)
    start = lesson.weights()
    beliefs = teacher(lesson)
    lesson.load(start)

    def measured() -> float:
        with torch.inference_mode():
            return float(divergence(student(inputs), beliefs))

    before = measured()
    FedDF(**options).train(lesson)
    return before, measured(), lesson.weights()


def test_distillation_moves_the_student_to_its_teachers_deterministically() -> None:
    options = {"steps": 300, "batch_size": 32, "learning_rate": 0.01}
    before, after, model = distilled(**options)
    assert after < before / 4
    assert shares == pytest.approx([1 / 3, 2 / 3, 1.0])
    _, _, again = distilled(**options)
    assert all(np.array_equal(model[name], again[name]) for name in model)


def test_distillation_stops_without_improvement_and_returns_the_best_model() -> None:
    before, after, model = distilled(
        steps=10_000, learning_rate=1e4, check_every=5, patience=20, gradient_clip=1e9
    )
    assert after == before
    assert all(np.array_equal(model[name], state_arrays(network(4))[name]) for name in model)
    assert len(shares) == 4


def test_feddf_without_client_models_is_refused() -> None:
    with pytest.raises(TrainingError, match="at least one client"):
        FedDF().train(training(network(), [], torch.zeros(4, 3)))
