"""Processor time of a round with noise at the coordinator, compared with one without noise.

    python benchmarks/coordinator_noise.py --clients 10 --samples 600

One process on one core trains LeNet-5 by the plain loop for each client, then reduces the updates,
to a plain mean and to a clipped mean with noise. The images are random, since times don't depend on
them. Transfers and evaluation are the same in both rounds and are not measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from repetitions import fastest
from rich.console import Console
from rich.table import Table
from torch import nn

from potluck.common.models.lenet import lenet5
from potluck.common.tensors.encoding import EncodedUpdate
from potluck.common.tensors.flat import FlatVector
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import TensorFile, open_tensors, write_tensors
from potluck.privacy.coordinator.noised_sum import opened_noised_sum, system_normals
from potluck.server.reduce.model_work import OpenedRound
from potluck.server.reduce.reduction import reduce
from potluck.server.strategy import Combine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10, help="number of updates in the round")
    parser.add_argument("--samples", type=int, default=600, help="number of samples of a client")
    parser.add_argument("--batch", type=int, default=32, help="number of samples of a batch")
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of repetitions; the fastest is printed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder), options.clients, options.samples, options.batch, options.repeats
        )
    if options.json:
        print(json.dumps(found))
        return
    table = Table("work", "s")
    for name, seconds in found.items():
        table.add_row(name, f"{seconds:.4f}")
    Console().print(table)


def measure(folder: Path, clients: int, samples: int, batch: int, repeats: int) -> dict[str, float]:
    """Return processor seconds by kind of work, and a round's ratio, with noise to without."""
    network = lenet5()
    model = stored(folder / "model", network)
    updates = []
    for number in range(clients):
        with torch.no_grad():
            for each in network.parameters():
                each.add_(0.01 * torch.randn_like(each))
        updates.append(EncodedUpdate(stored(folder / f"{number}", network), model.layout))
    weights = np.full(clients, 1 / clients)

    def mean() -> None:
        reduce(updates, Combine(weights=weights), model, threads=1)

    def noised() -> None:
        opened = OpenedRound(updates=updates, model=model, buffers=frozenset())
        with opened_noised_sum(
            nullcontext(opened),
            clip=1.0,
            noise_multiplier=1.0,
            clients=clients,
            normals=system_normals,
        ) as total:
            read, base = total.mean(), FlatVector(model.arrays, model.layout)
            for begin in range(0, model.layout.parameters, 2**18):
                end = min(begin + 2**18, model.layout.parameters)
                (read(begin, end) + base.block(begin, end)).astype(np.float32)

    trained = fastest(lambda: train(network, samples, batch), repeats)
    plain, with_noise = fastest(mean, repeats), fastest(noised, repeats)
    million = fastest(lambda: system_normals(1_000_000), repeats)
    return {
        "training of a client": trained,
        "plain mean": plain,
        "clipped mean with noise": with_noise,
        "noise for a million parameters": million,
        "ratio of the rounds": (clients * trained + with_noise) / (clients * trained + plain),
    }


def stored(path: Path, network: nn.Module) -> TensorFile:
    """Write a network's tensors to a file and open it."""
    write_tensors(path, state_arrays(network))
    return open_tensors(path)


def train(network: nn.Module, samples: int, batch: int) -> None:
    """Train a network with plain SGD, in one pass over random images."""
    images = torch.randn(samples, 3, 32, 32)
    labels = torch.randint(10, (samples,))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for begin in range(0, samples, batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            network(images[begin : begin + batch]), labels[begin : begin + batch]
        )
        torch.autograd.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
