"""Estimate the cost of experiments at a paper's own scale from one cell of the first file.

That cell (the paper's own method, in its first setting, with the first seed) is run for N rounds
and for 2N (`--rounds`). The difference is the processor time of N rounds with one evaluation. The
rest of the first run's time, without pre-training, is the cell's start. All other cells are assumed
to cost as much per client and round, whatever their method.

GPU hours are not measured: they are the number of steps times an assumed time per step on a GPU,
one client after another. Steps of small networks are limited by the launch of some hundred kernels,
not by computing.

    python benchmarks/experiment_costs.py --data data experiments/flash-*.toml [--step 1.0] [--json]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomlkit

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import stored_values
from potluck.experiments.grid.definition import ExperimentFile, get, load_experiment
from potluck.experiments.grid.results import CellResult


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Processor seconds of the start of a cell (one run, without pre-training) and of one client's
    round, and the number of local steps in one client's round."""

    start: float
    client_round: float
    client_steps: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimated cost of all cells (runs): core hours, million local steps, GPU hours of these
    steps."""

    experiment: str
    cells: int
    core_hours: float
    million_steps: float
    gpu_hours: float


def main() -> None:
    """Measure, and print a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="experiment files of one paper")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--quick", action="store_true", help="apply the files' [quick] tables")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds of the first run")
    parser.add_argument(
        "--step", type=float, default=1.0, help="assumed milliseconds per step on a GPU"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    experiments = [load_experiment(file, quick=options.quick) for file in options.files]
    measured = measure(experiments[0], options.data, options.rounds)
    costs = [cost_of(each, measured, options.step) for each in experiments]
    if options.json:
        print(json.dumps({"measured": asdict(measured), "costs": [asdict(each) for each in costs]}))
        return
    print(
        f"{experiments[0].name}: {measured.start:.1f} s to start, for each client a round "
        f"{measured.client_round:.3f} s and {measured.client_steps:.1f} steps"
    )
    for each in costs:
        print(
            f"{each.experiment:25} {each.cells:4} cells  {each.core_hours:8.2f} core hours  "
            f"{each.million_steps:8.2f} million steps  {each.gpu_hours:7.2f} GPU hours"
        )


def measure(experiment: ExperimentFile, data: Path, rounds: int) -> Measured:
    """Run a cell of the paper's own method twice. Raises ConfigurationError if there is none."""
    run = own_method(experiment)
    few, _ = _seconds(experiment, run, rounds, 1, data)
    more, cell = _seconds(experiment, run, rounds, 2, data)
    clients = sum(len(each.selected) for each in cell.rounds) / len(cell.rounds)
    per_round = (more - few) / rounds
    return Measured(
        start=max(few - (rounds + pretraining(run)) * per_round, 0.0),
        client_round=per_round / clients,
        client_steps=steps(cell) / clients / len(cell.rounds),
    )


def own_method(experiment: ExperimentFile) -> Mapping[str, Any]:
    """Return the first point of the grid that has the selector of the experiment's preset."""
    wanted = None if experiment.paper is None else get(experiment.paper.run, "selector.name")
    for _, run in experiment.points():
        if get(run, "selector.name") == wanted:
            return run
    raise ConfigurationError(f"{experiment.name} has no arm with its preset's selector, {wanted}")


def steps(cell: CellResult) -> int:
    """Return the number of local steps of all rounds, from the clients' numbers of samples."""
    training = stored_values(cell.run_file)["training"]
    epochs, batch = int(training["epochs"]), int(training["batch_size"])
    kept = 1.0 - float(training.get("validation_share", 0.0))
    samples = cell.traits["samples"]
    selected = [client for each in cell.rounds for client in each.selected]
    of_client = (samples[int(client.rpartition("-")[2])] * kept for client in selected)
    batches = sum(math.ceil(each / batch) for each in of_client)
    return batches * epochs


def cost_of(experiment: ExperimentFile, measured: Measured, step: float) -> Cost:
    """Return the cost of all cells of a file, from their rounds and clients. step: milliseconds."""
    runs = [run for _, run in experiment.points() for _ in experiment.seeds]
    client_rounds = sum(
        (int(run["rounds"]) + pretraining(run)) * run["clients_per_round"] for run in runs
    )
    seconds = client_rounds * measured.client_round + len(runs) * measured.start
    done = client_rounds * measured.client_steps
    return Cost(
        experiment=experiment.name,
        cells=len(runs),
        core_hours=seconds / 3600,
        million_steps=done / 1e6,
        gpu_hours=done * step / 1000 / 3600,
    )


def pretraining(run: Mapping[str, Any]) -> int:
    """Return the number of pre-training rounds of a run; each costs as much as another round."""
    return int(get(run, "profiles.triplet.pretraining_rounds") or 0)


def _seconds(
    experiment: ExperimentFile, run: Mapping[str, Any], rounds: int, times: int, data: Path
) -> tuple[float, CellResult]:
    """Run a cell for `rounds * times` rounds; return its total processor seconds and its result."""
    table = {**copy.deepcopy(dict(run)), "rounds": rounds * times, "evaluation": {"every": rounds}}
    content = {
        "name": experiment.name,
        "seeds": list(experiment.seeds[:1]),
        "hosts": experiment.hosts,
        "run": table,
        "disclosure": experiment.disclosure,
        "reading": {"metric": experiment.reading.metric},
    }
    with tempfile.TemporaryDirectory(prefix="potluck-costs-") as folder:
        file = Path(folder) / "one.toml"
        file.write_text(tomlkit.dumps(content), encoding="utf-8")
        before = _children()
        subprocess.run(_command(file, data, Path(folder) / "out"), check=True, capture_output=True)
        (found,) = (Path(folder) / "out" / "cells").glob("*.json")
        return _children() - before, CellResult.model_validate_json(found.read_bytes())


def _command(file: Path, data: Path, output: Path) -> Sequence[str]:
    potluck = Path(sys.executable).with_name("potluck")
    options = ["--jobs", "1", "--data", str(data), "--output", str(output)]
    return [str(potluck), "experiment", str(file), *options]


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
