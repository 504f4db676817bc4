"""Shares of clients that the audit of label counts suspects: honest clients and liars.

It simulates FedAvg on the task `digits` in one process. Honest clients claim their own label
counts, exactly or with noise (add-remove). Liars claim false counts, exactly or with noise.
`uniform` liars claim the same number of samples of every class (a flattering histogram). `hiding`
liars move the samples of their largest class to their smallest one.

    python benchmarks/label_audit.py [--seeds 3] [--rounds 12] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from in_process import client_data, fedavg, initial
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from potluck.client.disclosure.laplace import noisy_counts
from potluck.common.learning.training import training_for
from potluck.common.tasks.digits import Digits
from potluck.server.reduce.audit.label_audit import (
    BiasUpdates,
    LabelVerdict,
    LocalSteps,
    audit_labels,
    output_bias,
)

Counts = NDArray[np.int64]

CLIENTS = 24
ALPHAS = (0.5, 0.1)
COHORTS = (24, 9)
EPSILONS = (math.inf, 1.0, 0.5, 0.1, 0.01)
DRAWS = 20
"""Number of draws of the noise for each simulated training."""


def exactly(counts: Counts) -> Counts:
    return counts


def uniform(counts: Counts) -> Counts:
    claimed = np.full_like(counts, counts.sum() // len(counts))
    claimed[: counts.sum() % len(counts)] += 1
    return claimed


def hiding(counts: Counts) -> Counts:
    claimed = counts.copy()
    most, least = counts.argmax(), counts.argmin()
    claimed[least] += claimed[most]
    claimed[most] = 0
    return claimed


CLAIMS: dict[str, Callable[[Counts], Counts]] = {
    "honest": exactly,
    "uniform": uniform,
    "hiding": hiding,
}


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Share of clients reported as suspicious, over seeds and draws of the noise."""

    alpha: float
    cohort: int
    epsilon: float
    claim: str
    knows_steps: bool
    suspicious: float


def played(alpha: float, cohort: int, rounds: int, seed: int) -> tuple[Counts, list[BiasUpdates]]:
    """Return the clients' true label counts, and the updates that the coordinator sees."""
    task = Digits(clients=CLIENTS, alpha=alpha, seed=seed)
    counts = np.stack(
        [
            np.bincount(client_data(task, client).labels.numpy(), minlength=task.classes)
            for client in range(CLIENTS)
        ]
    )
    name = output_bias(initial(task, seed)[1], task.classes)
    settings = training_for(task, {}, source="benchmark")
    seen: list[BiasUpdates] = []
    for one in fedavg(task, clients=CLIENTS, count=cohort, rounds=rounds, seed=seed):
        changes, fewest = np.full(counts.shape, np.nan), np.zeros(counts.shape)
        spans = np.zeros(CLIENTS)
        for client, result in one.results.items():
            changes[client] = result[name].astype(np.float64) - one.received[name]
            steps = LocalSteps(
                samples=int(counts[client].sum()),
                steps=one.steps[client],
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                momentum=settings.momentum,
            )
            fewest[client], spans[client] = steps.fewest_samples(changes[client]), steps.span
        seen.append(BiasUpdates(changes=changes, fewest=fewest, spans=spans))
    return counts, seen


def claims(truth: Counts, epsilon: float, seed: int) -> NDArray[np.float64]:
    if math.isinf(epsilon):
        return truth.astype(np.float64)
    noisy = noisy_counts(
        truth.ravel().tolist(),
        epsilon=epsilon,
        adjacency="add-remove",
        randomness=random.Random(seed),
    )
    return np.array(noisy, dtype=np.float64).reshape(truth.shape)


def suspicious(
    counts: Counts, seen: list[BiasUpdates], claim: str, epsilon: float
) -> tuple[float, float]:
    """Return the share of suspicious clients, first with known steps, then from signs only."""
    told = np.stack([CLAIMS[claim](row) for row in counts])
    signs = [BiasUpdates(changes=updates.changes, spans=updates.spans) for updates in seen]
    found: dict[bool, list[bool]] = {True: [], False: []}
    for draw in range(1 if math.isinf(epsilon) else DRAWS):
        table = claims(told, epsilon, draw)
        for knows_steps, updates in ((True, seen), (False, signs)):
            audits = audit_labels(table, updates, noise_rates=np.full(CLIENTS, epsilon))
            found[knows_steps] += [audit.verdict is LabelVerdict.SUSPICIOUS for audit in audits]
    return float(np.mean(found[True])), float(np.mean(found[False]))


def measure(seeds: int, rounds: int) -> list[Rate]:
    rates: list[Rate] = []
    for alpha in ALPHAS:
        for cohort in COHORTS:
            runs = [played(alpha, cohort, rounds, seed) for seed in range(seeds)]
            for claim in CLAIMS:
                for epsilon in EPSILONS:
                    found = np.array([suspicious(*run, claim, epsilon) for run in runs])
                    rates += [
                        Rate(
                            alpha=alpha,
                            cohort=cohort,
                            epsilon=epsilon,
                            claim=claim,
                            knows_steps=knows_steps,
                            suspicious=float(found[:, column].mean()),
                        )
                        for column, knows_steps in enumerate((True, False))
                    ]
    return rates


def show(rates: list[Rate]) -> None:
    table = Table("alpha", "cohort", "claim", "bound", *(f"ε = {value:g}" for value in EPSILONS))
    rows: dict[tuple[float, int, str, bool], list[str]] = {}
    for rate in rates:
        key = (rate.alpha, rate.cohort, rate.claim, rate.knows_steps)
        rows.setdefault(key, []).append(f"{rate.suspicious:.3f}")
    for (alpha, cohort, claim, knows_steps), cells in rows.items():
        bound = "from steps" if knows_steps else "from sign"
        table.add_row(f"{alpha}", f"{cohort} of {CLIENTS}", claim, bound, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = measure(arguments.seeds, arguments.rounds)
    if arguments.json:
        exact = [asdict(rate) | {"epsilon": _finite(rate.epsilon)} for rate in rates]
        print(json.dumps({"suspicious": exact}))
    else:
        show(rates)


def _finite(epsilon: float) -> float | None:
    return None if math.isinf(epsilon) else epsilon


if __name__ == "__main__":
    main()
