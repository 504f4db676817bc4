"""Simulated cases: networks, clients and settings, the same for every system.

This module needs only torch, since peers import it in environments of their own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

CLASSES = 10


def lenet() -> nn.Module:
    """Return LeNet-5 with ReLU, for CIFAR-10's shapes: 62,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def perceptron() -> nn.Module:
    """Return the perceptron for Covertype: layers 54-45-30-15-C (C classes), with dropout."""
    layers: list[nn.Module] = []
    for before, after in ((54, 45), (45, 30), (30, 15)):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(15, CLASSES))


def simple_cnn() -> nn.Module:
    """Return the CNN of pfl-research's CIFAR-10 benchmark: two convolutions, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )


def tiny() -> nn.Module:
    """Return a tiny network for 32 features: 698 parameters."""
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A simulated experiment. count: clients per round. samples: number per client.

    shape: shape of a sample.
    """

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    count: int
    samples: int
    batch_size: int
    epochs: int
    learning_rate: float = 0.05

    @property
    def samples_per_round(self) -> int:
        """Number of samples processed in a round, counting repetitions."""
        return self.count * self.samples * self.epochs

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's inputs, n × shape, and labels, n."""
        generator = torch.Generator().manual_seed(client)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        return inputs, torch.randint(CLASSES, (self.samples,), generator=generator)

    def initial(self) -> nn.Module:
        """Return the initial network."""
        torch.manual_seed(1)
        return self.network()


IMAGE = (3, 32, 32)
CASES: Mapping[str, Case] = {
    "lenet5": Case(
        network=lenet, shape=IMAGE, clients=100, count=10, samples=500, batch_size=16, epochs=2
    ),
    "mlp": Case(
        network=perceptron,
        shape=(54,),
        clients=100,
        count=10,
        samples=5000,
        batch_size=16,
        epochs=2,
    ),
    "pfl-cifar10": Case(
        network=simple_cnn, shape=IMAGE, clients=1000, count=50, samples=50, batch_size=10, epochs=1
    ),
    "tiny": Case(
        network=tiny, shape=(32,), clients=1000, count=50, samples=200, batch_size=10, epochs=5
    ),
}


@cache
def kept_data(name: str, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's samples; each process creates them once."""
    return CASES[name].data(client)


class RoundNotes:
    """Records when rounds are committed: one JSON object per line, with a monotonic time."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def committed(self) -> None:
        """Record that a round is over."""
        self._note(what="committed", at=time.monotonic())

    def trained(self, way: str, reason: str) -> None:
        """Record how clients were trained, and the reason."""
        self._note(what="trained", at=time.monotonic(), way=way, reason=reason)

    def _note(self, **values: str | float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def cohort(case: Case, number: int) -> list[int]:
    """Return the clients of a round."""
    order = torch.Generator().manual_seed(1000 + number)
    return torch.randperm(case.clients, generator=order)[: case.count].tolist()


def train(network: nn.Module, inputs: Tensor, labels: Tensor, case: Case, seed: int) -> None:
    """Train by a bare loop: the minimum that PyTorch needs for a client's steps."""
    optimizer = torch.optim.SGD(network.parameters(), lr=case.learning_rate)
    order = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(case.epochs):
        for indices in torch.split(torch.randperm(len(labels), generator=order), case.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs[indices]), labels[indices])
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            optimizer.step()


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
