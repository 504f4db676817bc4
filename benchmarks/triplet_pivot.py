"""Errors of estimated triplets with ten classes, by the rule that chooses the pivot class.

The digits that come with Potluck are split over 24 clients with skewed labels (Dirichlet), and
coloured. A third of the clients have as many red as green images, a third have nine in ten red,
and of a third, even digits are red and odd ones green in 19 of 20 images. So the true triplets are
known. A client's error is the Euclidean distance between its triplet and the true one.

    python benchmarks/triplet_pivot.py [--seeds 3]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from in_process import CPU, Weights, client_data, fedavg
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn

from potluck.client.training.triplet_estimate import EstimateTerms, MatrixEstimate, estimate_matrix
from potluck.common.learning.heterogeneity import triplets
from potluck.common.learning.triplet import TripletSettings
from potluck.common.names import ClientId
from potluck.common.task import ClientData
from potluck.common.tasks.digits import Digits

CLIENTS, COHORT = 24, 9
SETTINGS = {
    "the paper's": {},
    "0.1, head 100 steps": {"learning_rate": 0.1, "attribute_steps": 100},
}
"""Learning rate of both trainings and numbers of steps, by name."""


@dataclass(frozen=True)
class ColoredTen(Digits):
    """Ten digits in red or green; groups are digit × 2 + colour."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        found = super().client_data(client, data)
        number = int(client.rpartition("-")[2])
        labels = found.train.labels
        generator = np.random.default_rng((self.seed, number))
        odd = labels.numpy() % 2
        green = [np.full(len(odd), 0.5), np.full(len(odd), 0.1), 0.05 + 0.9 * odd][number % 3]
        colors = torch.from_numpy((generator.random(len(odd)) < green).astype(np.int64))
        inputs = torch.zeros(len(odd), 2, 8, 8)
        inputs[torch.arange(len(odd)), colors] = found.train.inputs.reshape(-1, 8, 8)
        groups = labels * 2 + colors
        return replace(found, train=replace(found.train, inputs=inputs, groups=groups))


@cache
def pretrained(task: ColoredTen, seed: int) -> Weights:
    """Return the model after one round of FedAvg."""
    [played] = fedavg(task, clients=CLIENTS, count=COHORT, rounds=1, seed=seed)
    return played.model


def true_triplets(task: ColoredTen) -> NDArray[np.float64]:
    """Return the triplets that the colours give, clients × 3."""
    rows = [client_data(task, client).groups for client in range(CLIENTS)]
    counts = [np.bincount(row.numpy(), minlength=20) for row in rows if row is not None]
    return triplets(np.stack(counts).reshape(-1, 10, 2))


def estimates(task: ColoredTen, seed: int, settings: TripletSettings) -> list[MatrixEstimate]:
    """Return the estimate of each client."""
    return [
        estimate_matrix(
            task.model(),
            pretrained(task, seed),
            client_data(task, client),
            classes=10,
            terms=EstimateTerms(settings=settings, seed=seed * 1000 + client, device=CPU),
        )
        for client in range(CLIENTS)
    ]


def texts(errors: NDArray[np.float64]) -> tuple[str, str]:
    """Return the mean and the largest error as texts."""
    return f"{errors.mean():.3f}", f"{errors.max():.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    table = Table("α", "settings", "pivot", "mean", "largest", "degenerate", "pivot's share")
    for alpha in (0.1, 0.5):
        tasks = [ColoredTen(clients=CLIENTS, alpha=alpha, seed=seed) for seed in range(seeds)]
        true = np.stack([true_triplets(task) for task in tasks])
        for constant, guess in (("median", np.median(true, axis=1)), ("mean", true.mean(axis=1))):
            errors = np.linalg.norm(guess[:, None] - true, axis=2)
            table.add_row(f"{alpha:g}", f"constant {constant}", "", *texts(errors))
        for name, settings in SETTINGS.items():
            for pivot in ("absolute", "relative"):
                terms = TripletSettings.model_validate({**settings, "pivot": pivot})
                found = [estimates(task, seed, terms) for seed, task in enumerate(tasks)]
                guessed = [triplets(np.stack([one.matrix for one in each])) for each in found]
                errors = np.linalg.norm(np.stack(guessed) - true, axis=2)
                everyone = [one for each in found for one in each]
                shares = [
                    one.matrix[one.pivot].sum() / one.matrix.sum()
                    for one in everyone
                    if one.pivot is not None
                ]
                degenerate = f"{1 - len(shares) / len(everyone):.2f}"
                share = f"{np.mean(shares):.3f}" if shares else ""
                table.add_row(f"{alpha:g}", name, pivot, *texts(errors), degenerate, share)
    Console().print(table)


if __name__ == "__main__":
    main()
