"""Duration of one round's selection, by selector.

    python benchmarks/selection.py --clients 1000000 --clients-per-round 100 --json
    python benchmarks/selection.py

The first command prints `{"seconds": {selector: s}}`, the second a table from 10^3 to 10^6 clients.
There are ten classes. The fastest of a few rounds counts. Times include the answers to selectors'
questions, but not the creation of profiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from potluck.common.learning.heterogeneity import triplets
from potluck.common.settings.plugins import create
from potluck.server.selection import (
    Answers,
    Ask,
    Interview,
    Population,
    RoundOutcome,
    Selection,
    SelectionContext,
    Selector,
)

CLASSES = 10
ADDED = 0.9
"""Share of the cohort that the dc selectors choose by target."""
BUDGETS = {
    "fedentopt": 5.0,
    "dc-balanced": 5.0,
    "dc-real": 5.0,
    "neural-bandit": 5.0,
    "fed-cbs": 12.0,
}
"""Time limits in seconds for choosing 100 of a million clients; 1 s for other selectors."""

NAMES = (
    "uniform",
    "round-robin",
    "feddiverse",
    "known-matrix",
    "fedentopt",
    "fed-cbs",
    "fedpns",
    "delta",
    "flips",
    "clustered-sampling",
    "greedyfed",
    "kl",
    "dc-real",
    "dc-balanced",
    "dc-random",
    "pow-d",
    "flash",
    "feel",
    "ocs",
    "hcsfed",
    "fedlecc",
    "restless-bandit",
    "neural-bandit",
    "pyramidfl",
    "refl",
)


def profiles(clients: int) -> Population:
    """Return clients with labels by Dirichlet(0.3) and two attributes, 20 to 500 samples each."""
    generator = np.random.default_rng(0)
    samples = generator.integers(20, 500, clients)
    shares = generator.standard_gamma(0.3, (clients, CLASSES)) + 1e-12
    counts = np.floor(shares / shares.sum(axis=1, keepdims=True) * samples[:, None])
    with_attribute = np.floor(counts * generator.random((clients, CLASSES)))
    matrices = np.stack([with_attribute, counts - with_attribute], axis=2)
    return Population(
        ids=[f"k{row}" for row in range(clients)],
        classes=CLASSES,
        samples=counts.sum(axis=1).astype(np.int64),
        label_counts=counts,
        triplets=triplets(matrices),
        interaction_matrices=matrices,
    )


def played(selecting: Selection | Interview, number: int) -> tuple[Selection, Sequence[Answers]]:
    """Return the selection of a round, and the answers to the questions before it.

    All clients answer with numbers from 0.5 to 1.5.
    """
    if isinstance(selecting, Selection):
        return selecting, ()
    generator, answers = np.random.default_rng(number), list[Answers]()
    try:
        ask = next(selecting)
        while True:
            assert isinstance(ask, Ask)
            values = {name: generator.uniform(0.5, 1.5, len(ask.rows)) for name in ask.wanted}
            answers.append(Answers(rows=ask.rows, values=values))
            ask = selecting.send(answers[-1])
    except StopIteration as ended:
        return ended.value, answers


def seconds_per_round(selector: Selector, population: Population, count: int, rounds: int) -> float:
    """Return the shortest total time of `select` and `observe`, over a few successive rounds."""
    everybody = np.arange(len(population))
    state = selector.init(population)
    times = []
    for number in range(1, rounds + 1):
        context = SelectionContext(
            round=number, seed=1, count=count, population=population, available=everybody
        )
        begin = time.perf_counter()
        selection, answers = played(selector.select(state, context), number)
        outcome = RoundOutcome(
            round=number,
            selected=selection.rows,
            included=selection.rows,
            seconds=np.ones(len(selection.rows)),
            answers=answers,
        )
        state = selector.observe(state, outcome)
        times.append(time.perf_counter() - begin)
        assert len(selection.rows) == min(count, len(population))
    return min(times)


def measure(clients: int, count: int, names: Sequence[str]) -> dict[str, float]:
    """Return the seconds per round, by selector."""
    population = profiles(clients)
    rounds = 2 if clients >= 100_000 else 5
    result = {}
    for name in names:
        options = {"added": round(ADDED * count)} if name.startswith("dc-") else {}
        selector = create(Selector, name, options)
        result[name] = seconds_per_round(selector, population, count, rounds)
    return result


def print_growth(count: int, names: Sequence[str]) -> None:
    """Print a table of milliseconds per round, from 10^3 to 10^6 clients."""
    sizes = [10**power for power in range(3, 7)]
    columns = {size: measure(size, count, names) for size in sizes}
    print(f"ms per round, {count} clients selected, {CLASSES} classes")
    print(f"{'':14}" + "".join(f"{size:>12,}" for size in sizes) + f"{'budget':>12}")
    for name in names:
        cells = "".join(f"{1000 * columns[size][name]:12,.1f}" for size in sizes)
        print(f"{name:14}{cells}{1000 * BUDGETS.get(name, 1.0):12,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds that selectors take for one round.")
    parser.add_argument(
        "--clients", type=int, help="number of clients; default: a table of 10^3 to 10^6"
    )
    parser.add_argument(
        "--clients-per-round",
        type=int,
        default=100,
        help="number of clients selected per round (default: 100)",
    )
    parser.add_argument(
        "--selector", action="append", choices=NAMES, help="selector to measure; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    arguments = parser.parse_args()
    names = arguments.selector or NAMES
    if arguments.clients is None:
        print_growth(arguments.clients_per_round, names)
        return
    seconds = measure(arguments.clients, arguments.clients_per_round, names)
    if arguments.json:
        print(json.dumps({"seconds": seconds}))
    else:
        for name, value in seconds.items():
            print(f"{name:14}{value:10.4f} s")


if __name__ == "__main__":
    main()
