"""Numbers read from single cells and arms: metrics at their best, at the end and at equal budgets;
picks of clients; traits.

Pure functions of results. Units: shares in [0, 1], bytes, simulated seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from scipy import stats

from potluck.experiments.grid.definition import Metric
from potluck.experiments.grid.results import CellResult, RoundResult

WORST_TENTH = "worst_tenth"
"""Name, used like a metric's, of the mean accuracy of the worst tenth of the clients."""
MEASURES = {
    "accuracy": "accuracy",
    "worst_group_accuracy": "worst group",
    "weighted_f1": "weighted F1",
    "loss": "loss",
    WORST_TENTH: "worst tenth of clients",
}
"""Titles of metrics in tables and pictures."""


def evaluations(
    rounds: Sequence[RoundResult], metric: str, *, partial: bool = True
) -> list[tuple[int, float]]:
    """Return (round, value) of each evaluation of the model; NaN for a loss that was infinite.

    metric: a metric or `WORST_TENTH`. partial: True to include evaluations over fewer clients than
    the run requires.
    """
    return [
        (each.round, value)
        for each in rounds
        if (value := _value(each, metric)) is not None and (partial or not each.is_partial(metric))
    ]


def _value(found: RoundResult, metric: str) -> float | None:
    """Return a round's metric; None if the model was not evaluated."""
    value: float | None = getattr(found, metric)
    if value is None and metric == "loss" and found.accuracy is not None:
        return math.nan  # an infinite loss is not stored
    return value


def reading_of(rounds: Sequence[RoundResult], metric: str, last: int) -> float:
    """Return the mean of a metric over the last `last` evaluations; NaN if there are none."""
    return mean([value for _, value in evaluations(rounds, metric)][-last:])


def is_partial(rounds: Sequence[RoundResult], metric: str, last: int) -> bool:
    """Return True if one of the last `last` evaluations is partial: over too few clients."""
    numbers = {number for number, _ in evaluations(rounds, metric)[-last:]}
    return any(each.is_partial(metric) for each in rounds if each.round in numbers)


def best_of(rounds: Sequence[RoundResult], metric: str) -> tuple[int, float] | None:
    """Return (round, value) of the best evaluation, the first if several are; None if none is.

    Partial evaluations are skipped. The best round is chosen on the test samples, so the value is
    better than that of a run that has to choose its model without them.
    """
    sign = -1.0 if metric == "loss" else 1.0
    whole = [each for each in evaluations(rounds, metric, partial=False) if not math.isnan(each[1])]
    return max(whole, key=lambda each: sign * each[1], default=None)


def reached(rounds: Sequence[RoundResult], metric: Metric, target: float) -> int | None:
    """Return the first round whose evaluation reaches a target (for a loss: falls to it).

    Partial evaluations are skipped.
    """
    for number, value in evaluations(rounds, metric, partial=False):
        if value <= target if metric == "loss" else value >= target:
            return number
    return None


# Budgets -----------------------------------------------------------------------------------------

Spent = Callable[[CellResult], Sequence[float] | None]
"""Function that returns the cost of a cell up to the end of each round; None if unknown."""


def spent_rounds(cell: CellResult) -> Sequence[float]:
    """Return the number of rounds spent by the end of each round."""
    return [float(each.round) for each in cell.rounds]


def spent_bytes(cell: CellResult) -> Sequence[float] | None:
    """Return the bytes that would be sent if each client were on its own machine.

    Each client that trains or answers a question about the model receives the model. Clients that
    train also receive the strategy's additional data, and send updates. Costs before the first
    round are included.
    """
    if not cell.model_bytes:
        return None
    return list(
        accumulate(
            (
                each.downloads * cell.model_bytes
                + len(each.selected) * cell.strategy_bytes
                + each.bytes_up
                for each in cell.rounds
            ),
            initial=cell.before.bytes,
        )
    )[1:]


def spent_seconds(cell: CellResult) -> Sequence[float] | None:
    """Return the simulated seconds, including those before round 1; None on a real clock."""
    found = [each.simulated_seconds for each in cell.rounds]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return list(accumulate(known, initial=cell.before.seconds))[1:]


BUDGETS: Mapping[str, Spent] = {
    "rounds": spent_rounds,
    "bytes": spent_bytes,
    "simulated seconds": spent_seconds,
}


def common_budget(cells: Sequence[CellResult], spent: Spent, metric: str) -> float | None:
    """Return the budget at which all cells are compared; None if a cell's costs are unknown.

    It is the larger of two amounts: the total cost of the cheapest cell, and the cost at which
    every cell has been evaluated once. If the cheapest cell finishes before the others' first
    evaluation, it keeps its last result.
    """
    totals = [spent(cell) for cell in cells]
    known = [total for total in totals if total]
    if not known or len(known) < len(totals):
        return None
    firsts = [
        next(
            (
                cost
                for each, cost in zip(cell.rounds, total, strict=True)
                if _value(each, metric) is not None
            ),
            0.0,
        )
        for cell, total in zip(cells, known, strict=True)
    ]
    return max(min(total[-1] for total in known), *firsts)


def within(cell: CellResult, spent: Spent, budget: float, metric: str, last: int) -> float:
    """Return a cell's reading up to a budget; NaN if it has no evaluation within the budget."""
    return reading_of(rounds_within(cell, spent, budget), metric, last)


def rounds_within(cell: CellResult, spent: Spent, budget: float) -> Sequence[RoundResult]:
    """Return the rounds of a cell that end within a budget."""
    costs = spent(cell) or ()
    return [each for each, cost in zip(cell.rounds, costs, strict=False) if cost <= budget]


# Picks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Picks:
    """The distribution of a cell's picks over clients.

    evenness: 1 minus the Gini coefficient of the clients' numbers of picks: 1 if all numbers are
    equal, 1/K if one client has all picks. never: share of clients never picked. most: share of
    rounds with the client that was picked most often.
    """

    evenness: float
    never: float
    most: float


def pick_counts(cell: CellResult) -> np.ndarray:
    """Return the number of selections of each client, client-0 first: K, float64."""
    counted = Counter(client for each in cell.rounds for client in each.selected)
    counts = np.zeros(cell.clients)
    for client, picks in counted.items():
        counts[int(client.rpartition("-")[2])] = picks
    return counts


def picks_of(cell: CellResult) -> Picks:
    """Return the distribution of a cell's picks over clients."""
    counts = np.sort(pick_counts(cell))
    total, clients = counts.sum(), len(counts)
    if not total:
        return Picks(evenness=math.nan, never=1.0, most=0.0)
    ranks = np.arange(1, clients + 1)
    gini = float(((2 * ranks - clients - 1) * counts).sum() / (clients * total))
    return Picks(
        evenness=1.0 - gini,
        never=float((counts == 0).mean()),
        most=float(counts[-1]) / len(cell.rounds),
    )


# What was learnt ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leaning:
    """The relation between a cell's picks and a trait of the clients.

    correlation: Spearman's, between picks and the trait; 0 if all clients have the same number of
    picks. picked: the trait's mean over picks. all: the trait's mean over clients.
    """

    correlation: float
    picked: float
    all: float


def leaning(cell: CellResult, trait: str) -> Leaning | None:
    """Return the relation between picks and a trait; None if the trait is unknown or constant."""
    values = np.array(cell.traits.get(trait, ()), dtype=np.float64)
    counts = pick_counts(cell)
    if len(values) != len(counts) or np.ptp(values) == 0 or not counts.sum():
        return None
    correlation = 0.0
    if np.ptp(counts) > 0:
        correlation = float(np.corrcoef(stats.rankdata(counts), stats.rankdata(values))[0, 1])
    return Leaning(
        correlation=correlation,
        picked=float((counts * values).sum() / counts.sum()),
        all=float(values.mean()),
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean of numbers; NaN if there are none."""
    return float(np.mean(values)) if values else math.nan


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (n − 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
