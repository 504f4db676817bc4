"""Benchmarks on a GPU: speed compared with a bare loop, bfloat16, several clients at once, memory.

Also the cost of determinism, the difference between triplets computed on a GPU and on a processor,
and a cell of FLASH with ResNet-18.

Everything also runs on a processor, at a smaller size, so that the benchmark itself can be tried
there. Sections that are meaningless without a GPU are skipped and reported as skipped.

    python benchmarks/gpu.py --data data                       # on cuda:0
    python benchmarks/gpu.py --device cpu --data data
    python benchmarks/gpu.py --only training --only memory --json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import tomlkit
import torch
import training
from torch import nn

from potluck.client.training.determinism import compute_deterministically
from potluck.client.training.objectives.cross_entropy import CrossEntropy
from potluck.client.training.steps.loop import TrainingContext, train
from potluck.client.training.triplet_estimate import (
    EstimateTerms,
    estimate_matrix,
)
from potluck.common.learning.heterogeneity import triplet
from potluck.common.learning.triplet import TripletSettings
from potluck.common.models.lenet import lenet5
from potluck.common.models.perceptron import perceptron
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Examples
from potluck.common.tasks.digits import ColoredDigits
from potluck.common.tensors.model_arrays import state_arrays
from potluck.experiments.models.resnet import resnet18_gn

FLASH = Path(__file__).parents[1] / "experiments" / "flash-cifar10.toml"
NO_GPU = "a processor has no such thing; run this on a GPU"


class LeftOutError(Exception):
    """A section can't be measured; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its input shape, its number of classes, and the number of samples."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device, number of repetitions, data folder and number of rounds."""

    device: torch.device
    repeats: int
    data: Path
    rounds: int

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    def cases(self) -> dict[str, Case]:
        """Return the networks to measure, small ones first; fewer samples on a processor."""
        large = partial(resnet18_gn, classes=10, small_images=True)
        few = 1 if self.on_gpu else 20
        cifar = (3, 32, 32)
        return {
            "perceptron": Case(make=perceptron, shape=(54,), classes=2, samples=12800 // few),
            "LeNet-5": Case(make=lenet5, shape=cifar, classes=10, samples=12800 // few),
            "ResNet-18": Case(make=large, shape=cifar, classes=10, samples=2560 // few // 2),
        }


def samples_of(case: Case, device: torch.device) -> Examples:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(case.samples, *case.shape, generator=generator)
    return Examples(inputs=inputs, labels=torch.arange(case.samples) % case.classes).to(device)


def train_once(case: Case, data: Examples, device: torch.device, **settings: Any) -> nn.Module:
    """Train a network by Potluck's loop, wait for the device, and return it."""
    torch.manual_seed(1)
    model = case.make()
    context = TrainingContext(classes=case.classes, seed=1, round=1, device=device)
    lines = {**training.SETTINGS.model_dump(), **settings}
    train(model, data, CrossEntropy(), LocalTraining(**lines), context)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return model


def digest(model: nn.Module) -> str:
    arrays = state_arrays(model)
    content = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    return hashlib.sha256(content).hexdigest()[:16]


# The sections


def speed(setting: Setting) -> dict[str, Any]:
    """Measure samples per second of the bare loop, of Potluck's, and of a task's own trainer."""
    return {
        name: training.compare(case.make, samples_of(case, setting.device), setting.repeats)
        for name, case in setting.cases().items()
    }


def bfloat16(setting: Setting) -> dict[str, Any]:
    """Measure the speed-up by bfloat16 products, and how far the weights are from float32's."""
    if not setting.on_gpu:
        raise LeftOutError("on a processor, training always uses float32")
    found = {}
    for name, case in setting.cases().items():
        data = samples_of(case, setting.device)
        times: dict[str, list[float]] = {"float32": [], "bfloat16": []}
        models = {}
        for _ in range(setting.repeats + 1):
            for precision, seconds in times.items():
                started = time.perf_counter()
                models[precision] = train_once(case, data, setting.device, precision=precision)
                seconds.append(time.perf_counter() - started)
        one, other = (
            torch.cat([each.detach().flatten() for each in models[name].parameters()])
            for name in ("bfloat16", "float32")
        )
        medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
        found[name] = {
            "speedup": medians["float32"] / medians["bfloat16"],
            "relative_distance": float((one - other).norm() / other.norm()),
        }
    return found


def side_by_side(setting: Setting) -> dict[str, Any]:
    """Measure total samples per second of 1, 2 and 4 processes that train on the device at once."""
    numbers = (1, 2, 4) if setting.on_gpu else (1, 2)
    found = {}
    for number in numbers:
        context = multiprocessing.get_context("spawn")
        barrier, times = context.Barrier(number), context.SimpleQueue()
        processes = [
            context.Process(target=_beside_others, args=(str(setting.device), barrier, times))
            for _ in range(number)
        ]
        for process in processes:
            process.start()
        found[f"{number} at once"] = sum(times.get() for _ in processes)
        for process in processes:
            process.join()
    return found


def _beside_others(name: str, barrier: Barrier, speeds: Any) -> None:
    """Train in one of several processes; put its samples per second into `speeds`."""
    torch.set_num_threads(1)
    device = torch.device(name)
    case = Setting(device=device, repeats=1, data=Path(), rounds=0).cases()["LeNet-5"]
    data = samples_of(case, device)
    train_once(case, data, device)
    barrier.wait(300)
    started = time.perf_counter()
    for _ in range(3):
        train_once(case, data, device)
    passes = 3 * training.SETTINGS.epochs
    speeds.put(passes * case.samples / (time.perf_counter() - started))


def memory(setting: Setting) -> dict[str, Any]:
    """Measure the peak of allocated device memory, as a multiple of the bare loop's."""
    if not setting.on_gpu:
        raise LeftOutError(NO_GPU)
    found = {}
    for name, case in setting.cases().items():
        data, peaks = samples_of(case, setting.device), {}
        for which, loop in {"bare": training.bare_loop, "potluck": training.potluck_loop}.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(setting.device)
            loop(case.make().to(setting.device), data)
            peaks[f"{which}_megabytes"] = torch.cuda.max_memory_allocated(setting.device) / 1e6
        found[name] = peaks | {"ratio": peaks["potluck_megabytes"] / peaks["bare_megabytes"]}
    return found


def determinism(setting: Setting) -> dict[str, Any]:
    """Compare two processes' trained models bit by bit; measure deterministic kernels' cost."""
    found: dict[str, Any] = {}
    for which in ("free", "deterministic"):
        runs = [_in_a_process_of_its_own(which, setting.device) for _ in range(2)]
        found[which] = {
            "same_bits": runs[0]["digest"] == runs[1]["digest"],
            "seconds": min(run["seconds"] for run in runs),
        }
    found["price"] = found["deterministic"]["seconds"] / found["free"]["seconds"] - 1
    return found


def _in_a_process_of_its_own(which: str, device: torch.device) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", str(device), "--child", which]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _child(which: str, device: torch.device) -> dict[str, Any]:
    if which == "deterministic":
        compute_deterministically()
    torch.set_num_threads(1)
    case = Setting(device=device, repeats=1, data=Path(), rounds=0).cases()["LeNet-5"]
    data = samples_of(case, device)
    train_once(case, data, device)
    started = time.perf_counter()
    model = train_once(case, data, device)
    return {"seconds": time.perf_counter() - started, "digest": digest(model)}


def triplets(setting: Setting) -> dict[str, Any]:
    """Estimate a triplet on device and processor: seconds, and the difference of the results."""
    task = ColoredDigits()
    data = task.client_data(ClientId("client-2"), None).train
    settings = TripletSettings(bias_steps=5, attribute_steps=100, learning_rate=0.1)

    def estimated(device: torch.device) -> tuple[float, tuple[float, ...]]:
        torch.manual_seed(0)
        model = task.model()
        weights = {name: array.copy() for name, array in state_arrays(model).items()}
        terms = EstimateTerms(settings=settings, seed=1, device=device)
        started = time.perf_counter()
        found = estimate_matrix(model, weights, data.to(device), classes=2, terms=terms)
        return time.perf_counter() - started, triplet(found.matrix)

    estimated(setting.device)  # warm up
    seconds, there = estimated(setting.device)
    here_seconds, here = estimated(torch.device("cpu"))
    apart = max(abs(a - b) for a, b in zip(there, here, strict=True))
    return {"seconds": seconds, "processor_seconds": here_seconds, "largest_difference": apart}


def flash(setting: Setting) -> dict[str, Any]:
    """Run a cell of `experiments/flash-cifar10.toml`, ResNet-18: seconds per round, accuracy."""
    if not (setting.data / "cifar10.npz").is_file():
        raise LeftOutError(
            f"there is no cifar10.npz in {setting.data}; name its folder with --data"
        )
    grid: dict[str, Any] = tomllib.loads(FLASH.read_text())
    grid["run"]["model"] = {"name": "resnet18-gn", "classes": 10, "small_images": True}
    grid["run"]["rounds"] = setting.rounds
    grid["run"]["evaluation"]["every"] = min(setting.rounds, 25)
    if not setting.on_gpu:
        grid["run"] |= {"task": {"samples": 500, "test_samples": 100}}
        grid["run"] |= {"training": {"epochs": 1, "batch_size": 16}}
    for axis, label in (("heterogeneity", "both"), ("selection", "flash")):
        grid["axes"][axis] = {label: grid["axes"][axis][label]}
    grid["seeds"], grid["hosts"] = [0], 1
    grid["reading"] = {"metric": "accuracy"}
    del grid["quick"]
    with tempfile.TemporaryDirectory(prefix="potluck-gpu-") as name:
        file, output = Path(name) / "flash.toml", Path(name) / "results"
        file.write_text(tomlkit.dumps(grid))
        command = [sys.executable, "-m", "potluck.deploy", "experiment", str(file)]
        where = ["--data", str(setting.data), "--device", str(setting.device)]
        done = subprocess.run(
            [*command, *where, "--output", str(output)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr or done.stdout)
        [cell] = [json.loads(path.read_text()) for path in (output / "cells").glob("*.json")]
    measured = [each["accuracy"] for each in cell["rounds"] if each["accuracy"] is not None]
    return {
        "rounds": len(cell["rounds"]),
        "seconds_of_a_round": statistics.median(cell["timings"]["rounds"]),
        "seconds": cell["timings"]["total"],
        "accuracy": measured[-1],
    }


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "training": speed,
    "bfloat16": bfloat16,
    "side-by-side": side_by_side,
    "memory": memory,
    "determinism": determinism,
    "triplets": triplets,
    "flash": flash,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="section to run; default: all"
    )
    parser.add_argument(
        "--repeats", type=int, help="number of repetitions; default: 9 on a GPU, 2 on a CPU"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder that contains cifar10.npz"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="number of rounds of FLASH; default: 1,500, as in the paper; 2 on a CPU",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", choices=["free", "deterministic"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use here; --device cpu runs what runs without")
    if options.child:
        print(json.dumps(_child(options.child, device)))
        return
    torch.set_num_threads(1)
    on_gpu = device.type == "cuda"
    setting = Setting(
        device=device,
        repeats=options.repeats or (9 if on_gpu else 2),
        data=options.data,
        rounds=options.rounds or (1500 if on_gpu else 2),
    )
    name = torch.cuda.get_device_name(device) if on_gpu else "a processor"
    results: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for section in options.only or SECTIONS:
        try:
            results[section] = SECTIONS[section](setting)
        except LeftOutError as why:
            left_out[section] = str(why)
    found = {"device": str(device), "name": name, "results": results, "left_out": left_out}
    print(json.dumps(found) if options.json else _told(found))


def _told(found: Mapping[str, Any]) -> str:
    lines = [f"{found['device']}: {found['name']}"]
    for section, result in found["results"].items():
        lines += ["", f"{section}: {(SECTIONS[section].__doc__ or '').partition(chr(10))[0]}"]
        for key, value in result.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            words = "   ".join(f"{name} {_number(each)}".strip() for name, each in parts)
            lines.append(f"  {key:20} {words}")
    for section, why in found["left_out"].items():
        lines += ["", f"{section}: left out: {why}"]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
