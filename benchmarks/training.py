"""Samples per second of a client's training, side by side with a bare PyTorch loop.

Both take the same steps on the same batches, in turns, in one process; the medians are compared. On
a CPU it is the process's own time that counts, so that others on the machine don't matter.

    python benchmarks/training.py [--device cuda:0] [--threads 1] [--repeats 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.models.lenet import lenet5
from potluck.common.models.perceptron import perceptron
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples

SEED = 1


SETTINGS = LocalTraining(learning_rate=0.01, momentum=0.9, batch_size=64, epochs=2)


def bare_loop(model: nn.Module, data: Examples) -> None:
    """The least that PyTorch needs for the same steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    model.train()
    for _ in range(SETTINGS.epochs):
        permutation = torch.randperm(len(data), generator=order).to(data.labels.device)
        for start in range(0, len(data), SETTINGS.batch_size):
            indices = permutation[start : start + SETTINGS.batch_size]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data.inputs[indices]), data.labels[indices])
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            optimizer.step()


def potluck_loop(model: nn.Module, data: Examples) -> None:
    """What a client does."""
    train(
        model,
        data,
        CrossEntropy(),
        SETTINGS,
        TrainingContext(
            classes=int(data.labels.max()) + 1, seed=SEED, round=1, device=data.labels.device
        ),
    )


def seconds(
    loop: Callable[[nn.Module, Examples], None], make: Callable[[], nn.Module], data: Examples
) -> float:
    torch.manual_seed(0)
    model = make().to(data.labels.device)
    if data.labels.is_cuda:
        torch.cuda.synchronize()
    clock = time.perf_counter if data.labels.is_cuda else time.process_time
    started = clock()
    loop(model, data)
    if data.labels.is_cuda:
        torch.cuda.synchronize()
    return clock() - started


def compare(make: Callable[[], nn.Module], data: Examples, repeats: int) -> dict[str, float]:
    for loop in (bare_loop, potluck_loop):
        seconds(loop, make, data)  # warm up
    bare: list[float] = []
    ours: list[float] = []
    for repeat in range(repeats):
        turns = [(bare_loop, bare), (potluck_loop, ours)]
        for loop, times in turns if repeat % 2 else reversed(turns):
            times.append(seconds(loop, make, data))
    samples = len(data) * SETTINGS.epochs
    return {
        "bare_samples_per_second": samples / statistics.median(bare),
        "potluck_samples_per_second": samples / statistics.median(ours),
        "overhead": statistics.median(a / b for a, b in zip(ours, bare, strict=True)) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "LeNet-5, CIFAR-10 shapes": (lenet5, (3, 32, 32), 10),
        "perceptron, Covertype shapes": (perceptron, (54,), 2),
    }
    results = {}
    for name, (make, shape, classes) in cases.items():
        labels = torch.arange(arguments.samples) % classes
        data = Examples(inputs=torch.randn(len(labels), *shape), labels=labels).to(device)
        results[name] = compare(make, data, arguments.repeats)
    if arguments.json:
        print(json.dumps({"device": arguments.device, "batch_size": 64, "results": results}))
        return
    for name, result in results.items():
        print(
            f"{name:30} bare {result['bare_samples_per_second']:10,.0f}/s   potluck "
            f"{result['potluck_samples_per_second']:10,.0f}/s   overhead {result['overhead']:+.1%}"
        )


if __name__ == "__main__":
    main()
