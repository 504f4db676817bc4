"""Errors of clients' estimated triplets on the task colored-digits.

The true triplets are known here: they are computed from Table 6's matrices, scaled to the available
images. A client's error is the Euclidean distance between its triplet and the true one. The
benchmark prints the mean and the largest error over all clients and seeds. It compares them with
two constant predictions that need no estimate: the median and the mean of all true triplets, by
component.

    python benchmarks/triplet.py [--seeds 5] [--grid] [--privacy] [--json]

`--grid` tries other settings; `--privacy` adds noise, and measures what a single sample changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from in_process import CPU, Weights, client_data, fedavg, initial
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from potluck.client.disclosure.laplace import noisy_counts
from potluck.client.training.triplet_estimate import EstimateTerms, MatrixEstimate, estimate_matrix
from potluck.common.learning.heterogeneity import triplets
from potluck.common.learning.triplet import TripletSettings, triplet_settings_for
from potluck.common.task import Examples
from potluck.common.tasks.digits import ColoredDigits

Floats = NDArray[np.float64]

TASK = ColoredDigits()
COUNT = 9
TYPES = ("CI", "AI", "SC")
EPSILONS = (10.0, 5.0, 1.0, 0.5, 0.1)
NOISE_DRAWS = 20
INFLUENCE_CLIENTS = 6


@dataclass(frozen=True, kw_only=True)
class Error:
    """Euclidean distances from the true triplets: their mean, the largest, the mean by type."""

    mean: float
    supremum: float
    by_type: tuple[float, ...]

    @classmethod
    def of(cls, estimated: Floats, true: Floats) -> Error:
        """Return how far estimated triplets (… × K × 3, for K clients) are from the true ones (K ×
        3). The type of a client is the largest component of its true triplet: CI, AI or SC."""
        distances = np.linalg.norm(estimated - true, axis=-1)
        types = true.argmax(axis=1)
        return cls(
            mean=float(distances.mean()),
            supremum=float(distances.max()),
            by_type=tuple(float(distances[..., types == index].mean()) for index in range(3)),
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of all estimates with the same settings.

    degenerate: the share of estimates that found no attribute. head_accuracy: the head's mean
    accuracy over the other estimates; a client knows it without knowing the truth.
    """

    settings: dict[str, Any]
    error: Error
    degenerate: float
    head_accuracy: float


@cache
def data_of(client: int) -> Examples:
    return client_data(TASK, client)


@cache
def true_matrices() -> NDArray[np.int64]:
    """Return the true matrices, K × classes × 2. They need the images' colours, which estimates
    don't use."""
    rows = [data_of(client).groups for client in range(TASK.clients)]
    counts = [np.bincount(row.numpy(), minlength=TASK.groups) for row in rows if row is not None]
    return np.stack(counts).reshape(-1, TASK.classes, 2)


@cache
def pretrained(seed: int, rounds: int, count: int) -> Weights:
    """Return the model after `rounds` rounds of FedAvg with `count` random clients each."""
    weights = initial(TASK, seed)[1]
    for played in fedavg(TASK, clients=TASK.clients, count=count, rounds=rounds, seed=seed):
        weights = played.model
    return weights


def estimate(
    seed: int, client: int, settings: TripletSettings, data: Examples | None = None
) -> MatrixEstimate:
    """Return a client's estimated matrix. seed: also the seed of pre-training."""
    count = TASK.clients if settings.pretraining_participation == "all" else COUNT
    return estimate_matrix(
        TASK.model(),
        pretrained(seed, settings.pretraining_rounds, count),
        data_of(client) if data is None else data,
        classes=TASK.classes,
        terms=EstimateTerms(settings=settings, seed=seed * 1000 + client, device=CPU),
    )


def estimates(seeds: int, settings: TripletSettings) -> list[list[MatrixEstimate]]:
    """Return the estimates, by seed and client."""
    return [
        [estimate(seed, client, settings) for client in range(TASK.clients)]
        for seed in range(seeds)
    ]


def measure(seeds: int, settings: TripletSettings) -> Measured:
    found = estimates(seeds, settings)
    everyone = list(itertools.chain.from_iterable(found))
    accuracies = [one.head_accuracy for one in everyone if one.head_accuracy is not None]
    estimated = np.stack([triplets([one.matrix for one in of_seed]) for of_seed in found])
    return Measured(
        settings=settings.model_dump(exclude_unset=True),
        error=Error.of(estimated, triplets(true_matrices())),
        degenerate=float(np.mean([one.degenerate for one in everyone])),
        head_accuracy=float(np.mean(accuracies)),
    )


def constants() -> dict[str, Error]:
    """Return the error if every client's estimate is the federation's median or mean triplet."""
    true = triplets(true_matrices())
    return {
        "median": Error.of(np.broadcast_to(np.median(true, axis=0), true.shape), true),
        "mean": Error.of(np.broadcast_to(true.mean(axis=0), true.shape), true),
    }


def grid() -> Iterator[TripletSettings]:
    """Yield settings to try: the paper's three combined, then the head's, then the start's."""
    rates, bias, attribute = (1e-3, 1e-2, 1e-1), (5, 25, 50, 100), (5, 10, 25, 50, 100)
    for rate, bias_steps, attribute_steps in itertools.product(rates, bias, attribute):
        yield TripletSettings(
            learning_rate=rate, bias_steps=bias_steps, attribute_steps=attribute_steps
        )
    for rate, attribute_steps in itertools.product((1e-2, 1e-1, 1.0), (10, 25, 100, 500)):
        yield TripletSettings(attribute_learning_rate=rate, attribute_steps=attribute_steps)
    yield recommendation(pretraining_rounds=0)
    yield recommendation(pretraining_rounds=3)
    yield recommendation(head="zero")
    yield recommendation(q=0.7)


def recommendation(**changed: object) -> TripletSettings:
    return triplet_settings_for(TASK, changed, source="benchmark")


def with_noise(found: Sequence[Sequence[MatrixEstimate]], epsilon: float) -> Error:
    """Return the error of triplets from matrices with noise (add-remove), clipped at 0."""
    randomness = random.Random(0)
    estimated = []
    for of_seed in found:
        cells = np.stack([one.matrix for one in of_seed])
        for _ in range(NOISE_DRAWS):
            noisy = noisy_counts(
                cells.ravel().tolist(),
                epsilon=epsilon,
                adjacency="add-remove",
                randomness=randomness,
            )
            estimated.append(triplets(np.maximum(noisy, 0).reshape(cells.shape)))
    return Error.of(np.stack(estimated), triplets(true_matrices()))


def influences(settings: TripletSettings) -> list[int]:
    """Return the L1 change of the estimated matrix without one sample, for a few clients' samples.

    1 means that only this sample's cell changed. The order of the attributes is ignored.
    """
    changes = []
    for client in range(INFLUENCE_CLIENTS):
        whole, data = estimate(0, client, settings).matrix, data_of(client)
        for left_out in range(len(data)):
            kept = torch.arange(len(data)) != left_out
            rest = Examples(inputs=data.inputs[kept], labels=data.labels[kept])
            found = estimate(0, client, settings, rest).matrix
            changes.append(
                min(int(np.abs(whole - found).sum()), int(np.abs(whole - found[:, ::-1]).sum()))
            )
    return changes


def table(title: str, errors: Mapping[str, tuple[Error, Measured | None]]) -> Table:
    shown = Table("", "mean", "largest", *TYPES, "head", "degenerate", title=title)
    for name, (error, measured) in errors.items():
        numbers = [error.mean, error.supremum, *error.by_type]
        if measured is not None:
            numbers += [measured.head_accuracy, measured.degenerate]
        shown.add_row(name, *(f"{number:.3f}" for number in numbers))
    return shown


def named(measured: Measured) -> str:
    return ", ".join(f"{key} = {value}" for key, value in measured.settings.items()) or "paper's"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--privacy", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    chosen = [TripletSettings(), recommendation(), recommendation(pretraining_participation="all")]
    chosen += grid() if arguments.grid else ()
    measured = [measure(arguments.seeds, settings) for settings in chosen]
    noise: dict[float, Error] = {}
    influence: list[int] = []
    if arguments.privacy:
        found = estimates(arguments.seeds, recommendation())
        noise = {epsilon: with_noise(found, epsilon) for epsilon in EPSILONS}
        influence = influences(recommendation())
    if arguments.json:
        answer = {
            "constants": {name: asdict(error) for name, error in constants().items()},
            "estimates": [asdict(one) for one in measured],
            "noise": {str(epsilon): asdict(error) for epsilon, error in noise.items()},
            "influence": influence,
        }
        print(json.dumps(answer))
        return
    console = Console()
    rows = {f"constant {name}": (error, None) for name, error in constants().items()}
    console.print(table("Error", rows | {named(one): (one.error, one) for one in measured}))
    if noise:
        noisy = {f"ε = {epsilon:g}": (error, None) for epsilon, error in noise.items()}
        console.print(table("With noise on the matrix", noisy))
        shares = np.percentile(influence, [50, 90, 100]).astype(int).tolist()
        console.print(f"One sample changes the matrix by (median, 90 %, most): {shares}")


if __name__ == "__main__":
    main()
