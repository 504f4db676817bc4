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
from collections.abc import Sequence

from potluck.common.settings.plugins import create
from potluck.experiments.benchmark.selection_time import CLASSES, profiles, seconds_per_round
from potluck.server.selection import Selector

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
    "k-vib",
    "osmd",
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
