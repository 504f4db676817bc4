"""Processor time of a training with noise for single records, in multiples of the plain loop's.

Both loops take the same number of steps on batches of the same mean size. They take turns in one
process, and their medians over all turns are compared. Processor time is used, so that other
processes don't matter.

    python benchmarks/private_training.py [--threads 1] [--repeats 5] [--samples 1280] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from potluck.client.private_training import GrantedTraining
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.common.models.lenet import lenet5
from potluck.common.models.perceptron import perceptron
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.privacy.host.record_training import RecordTraining

SETTINGS = LocalTraining(learning_rate=0.01, momentum=0.9, batch_size=64)


def plain(model: nn.Module, data: Examples) -> None:
    """Train as a client does without noise."""
    train(model, data, CrossEntropy(), SETTINGS, _context(data))


def private(model: nn.Module, data: Examples) -> None:
    """Train as a client does with noise."""
    granted = GrantedTraining(
        sampling_rate=SETTINGS.batch_size / len(data),
        noise_multiplier=1.0,
        steps=SETTINGS.planned_steps(len(data)),
        clip=1.0,
        expected_batch=SETTINGS.batch_size,
    )
    RecordTraining().train(model, data, CrossEntropy(), SETTINGS, _context(data), granted)


def _context(data: Examples) -> TrainingContext:
    return TrainingContext(
        classes=int(data.labels.max()) + 1, seed=1, round=1, device=data.labels.device
    )


def seconds(loop: Callable[[nn.Module, Examples], None], model: nn.Module, data: Examples) -> float:
    """Return the processor time of a training."""
    started = time.process_time()
    loop(model, data)
    return time.process_time() - started


def main() -> None:
    """Print the ratio for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1280)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "LeNet-5, CIFAR-10 shapes": (lenet5, (3, 32, 32), 10),
        "perceptron, Covertype shapes": (perceptron, (54,), 2),
    }
    results = {}
    for name, (make, shape, classes) in cases.items():
        labels = torch.arange(arguments.samples) % classes
        data = Examples(inputs=torch.randn(len(labels), *shape), labels=labels)
        pairs: list[tuple[float, float]] = []
        for repeat in range(arguments.repeats + 1):
            loops = (plain, private) if repeat % 2 else (private, plain)
            times = {loop: seconds(loop, make(), data) for loop in loops}
            pairs.append((times[plain], times[private]))
        measured = pairs[1:]  # the first warms up
        results[name] = {
            "plain_samples_per_second": len(data) / statistics.median(p for p, _ in measured),
            "private_samples_per_second": len(data) / statistics.median(n for _, n in measured),
            "ratio": statistics.median(noisy / bare for bare, noisy in measured),
        }
    if arguments.json:
        print(json.dumps({"batch_size": SETTINGS.batch_size, "results": results}))
        return
    for name, result in results.items():
        print(
            f"{name:30} plain {result['plain_samples_per_second']:10,.0f}/s   with noise "
            f"{result['private_samples_per_second']:10,.0f}/s   {result['ratio']:.2f} times"
        )


if __name__ == "__main__":
    main()
