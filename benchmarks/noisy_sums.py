"""Effect of noise in totals and in groups (cells) on the cohorts' label balance and on scores.

    potluck data prepare mnist --from FOLDER --to data     # and cifar10
    python benchmarks/noisy_sums.py dc --data data
    python benchmarks/noisy_sums.py fedentopt --data data

Task, rounds, cohorts and training are those of `experiments/dc-mnist.toml` and
`experiments/fedentopt-cifar10.toml` with --quick, without a network. Every client is on a host of
its own; groups and noise are made by the product's own functions. `--selections N` only chooses
cohorts, for N seeds, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process import CPU, client_data, initial, play
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from potluck.client.disclosure.laplace import noisy_counts
from potluck.common.learning.evaluation import evaluate
from potluck.common.learning.sample_counts import label_counts
from potluck.common.learning.training import training_for
from potluck.common.settings.plugins import create
from potluck.common.task import Task
from potluck.common.tensors.model_arrays import load_arrays
from potluck.experiments.grid.definition import load_experiment
from potluck.secagg.protocol import Noise, complete_thresholds
from potluck.secagg.protocol.primitives.cells import cells_of_members
from potluck.secagg.protocol.primitives.thresholds import (
    assumed_colluding_hosts,
    colluding_clients,
)
from potluck.secagg.protocol.vectors.noise import noise_share
from potluck.server.selection import Population, RoundOutcome, Selection, SelectionContext, Selector
from potluck.server.selectors.parts.dc_parts import distance

Floats = NDArray[np.float64]

FILES = {"dc": "dc-mnist", "fedentopt": "fedentopt-cifar10"}
COUNTS_EPSILON = 1.0
"""ε of single clients' noisy label counts; it is also the default of clients."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A selector and its input. counts: kind of label counts: `exact`, `noisy`, `cells` (groups).

    sums: ε of the groups' sums and of the total; None for exact values. total: True if the arm has
    a secure total.
    """

    selector: str
    counts: str = "exact"
    sums: float | None = None
    total: bool = False

    @property
    def name(self) -> str:
        noise = "exact" if self.sums is None else f"ε = {self.sums:g}"
        if self.counts == "cells":
            return f"{self.selector}, cells {noise}"
        return f"{self.selector}, {self.counts} counts" + f", total {noise}" * self.total


DC = [
    Arm(selector="dc-random"),
    *(Arm(selector="dc-balanced", counts=counts) for counts in ("exact", "noisy", "cells")),
    *(Arm(selector="dc-balanced", counts="cells", sums=epsilon) for epsilon in (0.5, 0.1)),
    *(
        Arm(selector="dc-real", counts="noisy", sums=epsilon, total=True)
        for epsilon in (None, 0.5, 0.1)
    ),
    *(Arm(selector="dc-real", counts="cells", sums=epsilon) for epsilon in (None, 0.5, 0.1)),
]
FEDENTOPT = [
    Arm(selector="uniform"),
    *(Arm(selector="fedentopt", counts=counts) for counts in ("exact", "noisy", "cells")),
    *(Arm(selector="fedentopt", counts="cells", sums=epsilon) for epsilon in (0.5, 0.1)),
]
ARMS = {"dc": DC, "fedentopt": FEDENTOPT}


@dataclass(frozen=True, kw_only=True)
class Played:
    """Result of one run: means over its cohorts, and the final model's score.

    even: 1 − cos between the cohort's label counts and equal counts of all classes. federation: 1 −
    cos between the cohort's label counts and those of the whole federation. score: the experiment's
    metric; None if nothing was trained.
    """

    arm: str
    seed: int
    even: float
    federation: float
    score: float | None


def summed(counts: Floats, epsilon: float | None, source: random.Random) -> Floats:
    """Return a secure sum over clients with one host each. counts: clients × classes."""
    total: Floats = counts.sum(axis=0)
    if epsilon is None:
        return total
    hosts = [f"host-{number}" for number in range(len(counts))]
    colluding = assumed_colluding_hosts(len(hosts))
    honest = complete_thresholds(hosts, colluding).quorum - colluding_clients(hosts, colluding)
    noise = Noise(epsilon=epsilon, sensitivity=2, contributors=max(1, honest))
    shares = [noise_share(noise, counts.shape[1], source.randbytes) for _ in hosts]
    noisy: Floats = total + np.sum(shares, axis=0)
    return noisy


def population(arm: Arm, counts: Floats, seed: int) -> Population:
    """Return the population as the coordinator knows it. counts: true counts, clients × classes."""
    source = random.Random(f"noise {seed}")
    ids = [f"client-{number}" for number in range(len(counts))]
    told = counts.copy()
    if arm.counts == "noisy":
        for row in told:
            row[:] = noisy_counts(
                [int(each) for each in row],
                epsilon=COUNTS_EPSILON,
                adjacency="replace",
                randomness=source,
            )
    total = summed(counts, arm.sums, source) if arm.total else None
    if arm.counts == "cells":
        hosts = {client: client for client in ids}
        rows = {client: row for row, client in enumerate(ids)}
        drawn = cells_of_members(hosts, f"federation {seed}", data_epoch=1, least_hosts=5)
        total = np.zeros(counts.shape[1])
        for cell in drawn:
            members = [rows[client] for client in cell]
            of_cell = summed(counts[members], arm.sums, source).clip(min=0.0)
            told[members] = of_cell / len(members)
            total += of_cell
    return Population(
        ids=ids,
        classes=counts.shape[1],
        samples=counts.sum(axis=1).astype(np.int64),
        label_counts=told,
        label_totals=total,
    )


def cohorts(
    selector: Selector, known: Population, run: Mapping[str, Any], seed: int
) -> Iterator[Any]:
    """Yield the selected rows of each round."""
    state, everybody = selector.init(known), np.arange(len(known))
    for number in range(1, run["rounds"] + 1):
        context = SelectionContext(
            round=number,
            seed=seed,
            count=run["clients_per_round"],
            population=known,
            available=everybody,
        )
        selection = selector.select(state, context)
        assert isinstance(selection, Selection)
        rows = selection.rows
        seconds = np.ones(len(rows))
        outcome = RoundOutcome(round=number, selected=rows, included=rows, seconds=seconds)
        state = selector.observe(state, outcome)
        yield rows


def played(job: tuple[Arm, int], experiment: str, data: Path, *, training: bool) -> Played:
    """Simulate one run. Return its result."""
    torch.set_num_threads(1)
    arm, seed = job
    file = load_experiment(Path("experiments") / f"{FILES[experiment]}.toml", quick=True)
    _, run = next(iter(file.points()))
    options = {key: value for key, value in run["task"].items() if key != "name"}
    task = create(Task, run["task"]["name"], {**options, "seed": seed})
    clients = range(options["clients"])
    truth = np.array(
        [label_counts(client_data(task, each, data), task.classes) for each in clients], np.float64
    )
    choice = {"fedentopt": {"buffer": 70}, "uniform": {}}.get(arm.selector, {"added": 5})
    selector = create(Selector, arm.selector, choice)
    chosen = list(cohorts(selector, population(arm, truth, seed), with_count(run, arm), seed))
    mixes = [truth[rows].sum(axis=0) for rows in chosen]
    return Played(
        arm=arm.name,
        seed=seed,
        even=statistics.mean(distance(mix, np.ones(task.classes)) for mix in mixes),
        federation=statistics.mean(distance(mix, truth.sum(axis=0)) for mix in mixes),
        score=learned(task, run, chosen, seed, data, file.reading) if training else None,
    )


def with_count(run: Mapping[str, Any], arm: Arm) -> Mapping[str, Any]:
    """Return the run with the arm's cohort size: dc selectors choose ten clients and add five."""
    return {**run, "clients_per_round": 15} if arm.selector.startswith("dc-") else run


def learned(
    task: Task, run: Mapping[str, Any], chosen: Sequence[Any], seed: int, data: Path, reading: Any
) -> float:
    """Return the metric's mean over the last evaluations of FedAvg with these cohorts."""
    settings = training_for(task, run["training"], source="benchmark")
    held_out = task.evaluation_data(data)
    assert held_out is not None
    model, weights = initial(task, seed)
    scores, every = [], run["evaluation"]["every"]
    for number, rows in enumerate(chosen, start=1):
        weights = play(
            task, model, weights, rows.tolist(), settings, seed=seed, number=number, data=data
        ).model
        if number % every == 0 or number == len(chosen):
            load_arrays(model, weights)
            counts = evaluate(model, held_out, classes=task.classes, groups=task.groups, device=CPU)
            scores.append(getattr(counts.metrics(), reading.metric))
    last: list[float] = scores[-reading.last :]
    return statistics.mean(last)


def shown(found: Sequence[Played]) -> Table:
    """Return a table with one row per arm: mean ± standard deviation over seeds."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "from even", "from the federation's", "score"):
        table.add_column(name)
    for arm in dict.fromkeys(each.arm for each in found):
        mine = [each for each in found if each.arm == arm]
        scores = [each.score for each in mine if each.score is not None]
        table.add_row(
            arm,
            around([each.even for each in mine], 4),
            around([each.federation for each in mine], 4),
            around(scores, 3) if scores else "",
        )
    return table


def around(numbers: Sequence[float], digits: int) -> str:
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.{digits}f} ± {spread:.{digits}f}"


def main() -> None:
    """Parse the command line, play, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("experiment", choices=sorted(FILES))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--selections", type=int, help="choose cohorts for this number of seeds, and train nothing"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    seeds = range(options.selections or options.seeds)
    play_one = partial(
        played,
        experiment=options.experiment,
        data=options.data,
        training=options.selections is None,
    )
    jobs = [(arm, seed) for seed in seeds for arm in ARMS[options.experiment]]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(play_one, jobs))
    if options.json:
        print(json.dumps([vars(each) for each in found]))
    else:
        Console(width=120).print(shown(found))


if __name__ == "__main__":
    main()
