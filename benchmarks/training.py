"""Samples per second of a client's training, side by side with a bare PyTorch loop.

Three loops are timed: the bare loop, Potluck's built-in loop, and the bare loop as a task's own
trainer. They take the same steps on the same batches, in turns, in one process; their medians are
compared. The time of the task's own trainer includes a host's work around it: reading the weights
from a file and checking the result. On a CPU, the process's own processor time is used, so that
other processes don't matter.

    python benchmarks/training.py [--device cuda:0] [--threads 1] [--repeats 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.own_training import OwnTraining
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.client.training.task_training import LoadedTask, TrainingFiles
from potluck.common.models.lenet import lenet5
from potluck.common.models.perceptron import perceptron
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import ClientData, Examples, Task
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measures,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)
from potluck.rpc.v1 import coordinator_pb2 as rpc

SEED = 1


SETTINGS = LocalTraining(learning_rate=0.01, momentum=0.9, batch_size=64, epochs=2)


def bare_loop(
    model: nn.Module, data: Examples, report: Callable[[float], None] = lambda _: None
) -> None:
    """Train by a bare loop: the minimum that PyTorch needs for the same steps."""
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
            report(start / len(data))


def potluck_loop(model: nn.Module, data: Examples) -> None:
    """Train as a client does."""
    train(
        model,
        data,
        CrossEntropy(),
        SETTINGS,
        TrainingContext(
            classes=int(data.labels.max()) + 1, seed=SEED, round=1, device=data.labels.device
        ),
    )


class Bare(Trainer):
    """The bare loop as a trainer that reports at every step."""

    measures: ClassVar = {"loss": Measure(label="loss")}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        bare_loop(model, data, report)
        return Contribution(samples=len(data))

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        return {}


@dataclass(frozen=True, kw_only=True)
class Own(Task):
    """A task that trains with `Bare`, on a given model and given samples."""

    network: nn.Module
    samples: Examples

    def model(self) -> nn.Module:
        return self.network

    def trainer(self) -> Trainer:
        return Bare()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        return ClientData(train=self.samples)

    def evaluation_data(self, data: Path | None) -> None:
        return None


def own_loop(model: nn.Module, data: Examples) -> None:
    """Train as a client does for a task that has its own trainer."""
    device = "cpu" if data.labels.device.type == "cpu" else str(data.labels.device)
    loaded = LoadedTask("own", Own(network=model, samples=data), device, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tensors(path, state_arrays(model))
        instruction = rpc.Instruction(client_id="client-0", round=1, train=rpc.Train(seed=SEED))
        files = TrainingFiles(model=path, update=path.with_name("update"), keep_at=path.with_name)
        OwnTraining(loaded, Bare()).train(instruction, files, TrainingProgress())


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
    for loop in (bare_loop, potluck_loop, own_loop):
        seconds(loop, make, data)  # warm up
    bare: list[float] = []
    ours: list[float] = []
    own: list[float] = []
    for repeat in range(repeats):
        turns = [(bare_loop, bare), (potluck_loop, ours), (own_loop, own)]
        for loop, times in turns if repeat % 2 else reversed(turns):
            times.append(seconds(loop, make, data))
    samples = len(data) * SETTINGS.epochs
    return {
        "bare_samples_per_second": samples / statistics.median(bare),
        "potluck_samples_per_second": samples / statistics.median(ours),
        "own_trainer_samples_per_second": samples / statistics.median(own),
        "overhead": overhead(ours, bare),
        "own_trainer_overhead": overhead(own, bare),
    }


def overhead(times: Sequence[float], bare: Sequence[float]) -> float:
    """Return the extra time as a share of the bare loop's time: the median over turns."""
    return statistics.median(a / b for a, b in zip(times, bare, strict=True)) - 1


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
            f"{result['potluck_samples_per_second']:10,.0f}/s   overhead {result['overhead']:+.1%} "
            f"  own trainer {result['own_trainer_samples_per_second']:10,.0f}/s   overhead "
            f"{result['own_trainer_overhead']:+.1%}"
        )


if __name__ == "__main__":
    main()
