"""Summary of an experiment: one number per cell, means over seeds, tests against a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from potluck.experiments.grid.definition import SEED, ExperimentFile, Metric, PublishedFigure
from potluck.experiments.grid.results import CellResult, RoundResult
from potluck.experiments.reports.readings import is_partial, mean, reached, reading_of

Labels = Mapping[str, str]
Point = tuple[tuple[str, str], ...]
"""Labels of all axes except the seed, in order."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The difference between an arm and the baseline, paired by seed.

    p: p value of a two-sided paired t test; None if the test is impossible (fewer than two pairs,
    or all differences are equal). low, high: the 95 % confidence interval of the mean difference;
    None in the same cases.
    """

    pairs: int
    difference: float
    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs until a target is reached, means over the seeds that reach it.

    reached: number of seeds that reach the target. round: the first round whose evaluation reaches
    it. bytes: bytes sent in both directions up to this round.
    """

    target: float
    reached: int
    round: float | None
    bytes: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm: a point of the grid, with its repetitions (one per seed) and their statistics.

    values: the cells' numbers by seed. deviation: sample standard deviation (n − 1); None for one
    seed. clients: included clients per round, mean over rounds and seeds. entropy: label entropy in
    bits, mean over rounds and seeds. partial: True if a cell's number is over fewer clients than
    its run requires.
    """

    labels: Labels
    values: Mapping[str, float]
    mean: float
    deviation: float | None
    clients: float
    entropy: float
    bytes: float
    seconds: float
    costs: tuple[Costs, ...]
    test: PairedTest | None
    same_cohorts: bool
    published: tuple[PublishedFigure, ...]
    cells: tuple[CellResult, ...]
    partial: bool = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An experiment's arms in grid order.

    missing: number of unfinished cells. quick: True if the file's [quick] table was applied.
    """

    experiment: ExperimentFile
    arms: tuple[Arm, ...]
    missing: int
    quick: bool = False

    @property
    def seeds(self) -> int:
        """Number of requested repetitions."""
        return len(self.experiment.seeds)


def summarise(
    experiment: ExperimentFile,
    results: Sequence[CellResult],
    missing: int,
    *,
    quick: bool = False,
) -> Summary:
    """Return the summary of the finished cells; arms without a finished cell are omitted."""
    reading = experiment.reading
    grouped: dict[Point, list[CellResult]] = {}
    for labels, _ in experiment.points():
        grouped[tuple(labels.items())] = []
    for result in results:
        grouped[_point(result.labels)].append(result)
    numbers = {
        point: {
            cell.labels[SEED]: reading_of(cell.rounds, reading.metric, reading.last) for cell in of
        }
        for point, of in grouped.items()
    }
    sizes = {point: _clients(of) for point, of in grouped.items() if of}
    arms = [
        _arm(experiment, dict(point), of, numbers, sizes) for point, of in grouped.items() if of
    ]
    return Summary(experiment=experiment, arms=tuple(arms), missing=missing, quick=quick)


def _arm(
    experiment: ExperimentFile,
    labels: Labels,
    cells: Sequence[CellResult],
    numbers: Mapping[Point, Mapping[str, float]],
    sizes: Mapping[Point, float],
) -> Arm:
    reading, point = experiment.reading, _point(labels)
    base = _baseline(labels, reading.baseline)
    compared = base is not None and base != point and base in sizes
    values = list(numbers[point].values())
    return Arm(
        labels=labels,
        values=numbers[point],
        mean=mean(values),
        deviation=float(np.std(values, ddof=1)) if len(values) > 1 else None,
        clients=sizes[point],
        entropy=mean([each.entropy for cell in cells for each in cell.rounds]),
        bytes=mean([_bytes(cell.rounds) for cell in cells]),
        seconds=mean([sum(cell.timings.rounds) for cell in cells]),
        costs=tuple(_costs(cells, reading.metric, target) for target in reading.targets),
        test=paired_test(numbers[point], numbers[base]) if compared and base else None,
        same_cohorts=not compared or math.isclose(sizes[base or point], sizes[point], rel_tol=0.01),
        published=tuple(each for each in reading.published if _stands_for(each, labels)),
        cells=tuple(cells),
        partial=any(is_partial(cell.rounds, reading.metric, reading.last) for cell in cells),
    )


def paired_test(values: Mapping[str, float], baseline: Mapping[str, float]) -> PairedTest | None:
    """Compare two arms over their common seeds; None if they have no common seed.

    Arms with equal values in all seeds have p = 1. No test is possible with one seed, with a value
    that isn't finite, or if the difference is the same in all seeds.
    """
    seeds = [seed for seed in values if seed in baseline]
    if not seeds:
        return None
    differences = np.array([values[seed] - baseline[seed] for seed in seeds])
    mean, count = float(differences.mean()), len(differences)
    if count > 1 and not differences.any():
        return PairedTest(pairs=count, difference=0.0, low=0.0, high=0.0, p=1.0)
    if count < 2 or not np.isfinite(differences).all() or float(np.ptp(differences)) < 1e-12:
        return PairedTest(pairs=count, difference=mean, low=None, high=None, p=None)
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    width = float(stats.t.ppf(0.975, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean / error), count - 1))
    return PairedTest(pairs=count, difference=mean, low=mean - width, high=mean + width, p=p)


def _point(labels: Labels) -> Point:
    return tuple((axis, value) for axis, value in labels.items() if axis != SEED)


def _baseline(labels: Labels, baseline: Labels) -> Point | None:
    """Return the point of the grid with these labels, changed to those of the baseline where it
    sets any; None without a baseline."""
    if not baseline:
        return None
    return tuple((axis, baseline.get(axis, value)) for axis, value in labels.items())


def _stands_for(published: PublishedFigure, labels: Labels) -> bool:
    return all(labels.get(axis) == value for axis, value in published.where.items())


def _costs(cells: Sequence[CellResult], metric: Metric, target: float) -> Costs:
    firsts = [(cell, reached(cell.rounds, metric, target)) for cell in cells]
    those = [(cell, first) for cell, first in firsts if first is not None]
    if not those:
        return Costs(target=target, reached=0, round=None, bytes=None, seconds=None)
    return Costs(
        target=target,
        reached=len(those),
        round=mean([first for _, first in those]),
        bytes=mean([_bytes(cell.rounds[:first]) for cell, first in those]),
        seconds=mean([sum(cell.timings.rounds[:first]) for cell, first in those]),
    )


def _bytes(rounds: Sequence[RoundResult]) -> int:
    return sum(each.bytes_down + each.bytes_up for each in rounds)


def _clients(cells: Sequence[CellResult]) -> float:
    return mean([len(each.included) for cell in cells for each in cell.rounds])
