"""FedAvg in this process, without a network, for benchmarks that inspect rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.learning.training import training_for
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.model_arrays import load_arrays, state_arrays

Weights = Mapping[str, NDArray[Any]]
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class PlayedRound:
    """A finished round.

    received: the model at the round's start. results: trained weights by client number. steps:
    local steps by client number. model: the mean of the results, weighted by samples.
    """

    received: Weights
    results: Mapping[int, Weights]
    steps: Mapping[int, int]
    model: Weights


def initial(task: Task, seed: int) -> tuple[nn.Module, Weights]:
    """Return a new model and its weights."""
    torch.manual_seed(seed)
    model = task.model()
    return model, copied(model)


def copied(model: nn.Module) -> dict[str, NDArray[Any]]:
    return {name: array.copy() for name, array in state_arrays(model).items()}


def client_data(task: Task, client: int, data: Path | None = None) -> Examples:
    found: ClientData = task.client_data(ClientId(f"client-{client}"), data)
    return found.train


def fedavg(
    task: Task, *, clients: int, count: int, rounds: int, seed: int
) -> Iterator[PlayedRound]:
    """Play rounds with `count` of `clients` clients, drawn uniformly, with the task's settings."""
    model, weights = initial(task, seed)
    settings = training_for(task, {}, source="benchmark")
    generator = np.random.default_rng(seed)
    for number in range(1, rounds + 1):
        cohort = generator.permutation(clients)[:count].tolist()
        played = play(task, model, weights, cohort, settings, seed=seed, number=number)
        weights = played.model
        yield played


def play(
    task: Task,
    model: nn.Module,
    weights: Weights,
    cohort: Sequence[int],
    settings: LocalTraining,
    *,
    seed: int,
    number: int,
    data: Path | None = None,
) -> PlayedRound:
    """Train each client of a cohort in turn, and average the results."""
    results, steps, samples = dict[int, Weights](), dict[int, int](), dict[int, int]()
    for client in sorted(cohort):
        load_arrays(model, weights)
        result = train(
            model,
            client_data(task, client, data),
            CrossEntropy(),
            settings,
            TrainingContext(
                classes=task.classes,
                seed=(seed * 1000 + number) * 1000 + client,
                round=number,
                device=CPU,
            ),
        )
        results[client], steps[client] = copied(model), result.steps
        samples[client] = result.samples
    return PlayedRound(received=weights, results=results, steps=steps, model=mean(results, samples))


def mean(results: Mapping[int, Weights], samples: Mapping[int, int]) -> Weights:
    """Return the mean of the clients' weights, weighted by samples; sums are in float64."""
    shares = np.array([samples[client] for client in results], dtype=np.float64)
    shares /= shares.sum()
    [first, *_] = results.values()
    return {
        name: np.tensordot(
            shares, np.stack([result[name] for result in results.values()]).astype(np.float64), 1
        ).astype(array.dtype)
        for name, array in first.items()
    }
