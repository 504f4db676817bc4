"""Contests: points of a grid that differ in one axis only, compared at equal budgets. Pure.

Input: a summary. Output: numbers by arm and seed, and mean ranks over all contests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from potluck.experiments.grid.definition import SEED, Reading
from potluck.experiments.grid.results import CellResult, RoundResult
from potluck.experiments.reports.experiment_summary import Arm, Summary
from potluck.experiments.reports.ranks import Ranks, mean_ranks
from potluck.experiments.reports.readings import (
    BUDGETS,
    Leaning,
    Picks,
    best_of,
    common_budget,
    is_partial,
    leaning,
    mean,
    picks_of,
    reading_of,
    rounds_within,
)

LAST, BEST = "last", "best"
EQUAL = "at equal "

Values = Mapping[str, float]
"""Numbers by seed."""


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """An arm of a contest: one of the compared values, such as a selector.

    readings: numbers by metric and by reading, the point of a run at which the metric is taken.
    best_round: number of the best round, mean over seeds. picks: one record per seed. leanings: for
    each trait, its relation to the picks; one record per seed in which clients differ in the trait.
    partial: the readings with a partial evaluation in at least one seed.
    """

    name: str
    readings: Mapping[tuple[str, str], Values]
    best_round: float
    picks: Sequence[Picks]
    leanings: Mapping[str, Sequence[Leaning]]
    partial: Set[tuple[str, str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Arms that are compared with each other.

    where: the labels that all arms share. budgets: by reading, the budget at which the arms are
    compared, mean over seeds; unknown budgets are omitted.
    """

    where: Mapping[str, str]
    arms: Sequence[Competitor]
    budgets: Mapping[str, float]

    @property
    def title(self) -> str:
        """The labels that its arms share, in one line."""
        return ", ".join(f"{axis} = {value}" for axis, value in self.where.items())

    @property
    def column(self) -> str:
        """A shorter title: head of the contest's column in a table of contests."""
        return ", ".join(self.where.values()) or "all"


def contests_of(summary: Summary) -> list[Contest]:
    """Return the contests of an experiment in grid order; none if it compares no axis."""
    axis = summary.experiment.reading.compared
    if axis is None:
        return []
    grouped: dict[tuple[tuple[str, str], ...], list[Arm]] = {}
    for arm in summary.arms:
        where = tuple((name, value) for name, value in arm.labels.items() if name != axis)
        grouped.setdefault(where, []).append(arm)
    reading = summary.experiment.reading
    return [_contest(dict(where), arms, axis, reading) for where, arms in grouped.items()]


ALL = "all settings"


def together(contests: Sequence[Contest]) -> Contest | None:
    """Return all contests combined into one; None for fewer than two.

    Each reading of an arm is, by seed, its mean over the contests. Only arms and seeds that all
    contests have are included. Picks are omitted.
    """
    if len(contests) < 2:
        return None
    by_name = [{arm.name: arm for arm in each.arms} for each in contests]
    arms: list[Competitor] = []
    for name, first in by_name[0].items():
        if not all(name in each for each in by_name):
            continue
        same = [each[name] for each in by_name]
        readings: dict[tuple[str, str], Values] = {}
        for key, values in first.readings.items():
            of_all = [arm.readings.get(key, {}) for arm in same]
            readings[key] = {
                seed: mean([values[seed] for values in of_all])
                for seed in values
                if all(seed in each for each in of_all)
            }
        arms.append(
            Competitor(
                name=name,
                readings=readings,
                best_round=math.nan,
                picks=(),
                leanings={},
                partial=frozenset().union(*(arm.partial for arm in same)),
            )
        )
    return Contest(where={"": ALL}, arms=arms, budgets={})


def measures_of(reading: Reading) -> list[str]:
    """Return the metrics by which the arms of a contest are compared, the main metric first."""
    return list(dict.fromkeys([reading.metric, *reading.also]))


def _contest(where: Mapping[str, str], arms: Sequence[Arm], axis: str, reading: Reading) -> Contest:
    by_seed: dict[str, list[CellResult]] = {}
    for arm in arms:
        for cell in arm.cells:
            by_seed.setdefault(cell.labels[SEED], []).append(cell)
    limits = {
        EQUAL + name: {
            seed: common_budget(cells, spent, reading.metric) for seed, cells in by_seed.items()
        }
        for name, spent in BUDGETS.items()
    }
    known = {
        name: {seed: limit for seed, limit in limits[name].items() if limit is not None}
        for name in limits
    }
    return Contest(
        where=where,
        arms=[_competitor(arm, axis, reading, known) for arm in arms],
        budgets={name: mean(list(of.values())) for name, of in known.items() if of},
    )


def _competitor(
    arm: Arm, axis: str, reading: Reading, limits: Mapping[str, Mapping[str, float]]
) -> Competitor:
    readings: dict[tuple[str, str], Values] = {}
    partial: set[tuple[str, str]] = set()

    def read(measure: str, name: str, rounds: Mapping[str, Sequence[RoundResult]]) -> None:
        last = reading.last
        readings[measure, name] = {
            seed: reading_of(each, measure, last) for seed, each in rounds.items()
        }
        if any(is_partial(each, measure, last) for each in rounds.values()):
            partial.add((measure, name))

    for measure in measures_of(reading):
        read(measure, LAST, {cell.labels[SEED]: cell.rounds for cell in arm.cells})
        bests = {cell.labels[SEED]: best_of(cell.rounds, measure) for cell in arm.cells}
        readings[measure, BEST] = {
            seed: math.nan if best is None else best[1] for seed, best in bests.items()
        }
        for name, spent in BUDGETS.items():
            of_seed = limits[EQUAL + name]
            rounds = {
                seed: rounds_within(cell, spent, of_seed[seed])
                for cell in arm.cells
                if (seed := cell.labels[SEED]) in of_seed
            }
            read(measure, EQUAL + name, rounds)
    found = [best_of(cell.rounds, reading.metric) for cell in arm.cells]
    traits = dict.fromkeys(name for cell in arm.cells for name in cell.traits)
    leanings = {
        name: [each for cell in arm.cells if (each := leaning(cell, name)) is not None]
        for name in traits
    }
    return Competitor(
        name=arm.labels[axis],
        readings=readings,
        best_round=mean([float(best[0]) for best in found if best is not None]),
        picks=[picks_of(cell) for cell in arm.cells],
        leanings={name: of for name, of in leanings.items() if of},
        partial=frozenset(partial),
    )


@dataclass(frozen=True, kw_only=True)
class RankedReading:
    """Mean ranks of arms by one metric at one reading (a point of a run, such as its end).

    by_cell: ranks if every seed of every contest is a comparison. Seeds of one contest are not
    independent data sets, so the critical difference is smaller than it should be. by_contest:
    ranks if every contest is a comparison, of means over seeds.
    """

    measure: str
    reading: str
    by_cell: Ranks
    by_contest: Ranks


def ranked_readings(summary: Summary, contests: Sequence[Contest]) -> list[RankedReading]:
    """Return mean ranks of the arms that all contests have, by metric and reading.

    Readings are the last, the best, and those at equal budgets if the budgets are known. Contests
    without any evaluation are skipped, and so are seeds that an arm of a contest still lacks.
    """
    found: list[RankedReading] = []
    for measure in measures_of(summary.experiment.reading):
        for reading in (LAST, BEST, *(EQUAL + name for name in BUDGETS if name != "rounds")):
            by_cell = list(_blocks(contests, measure, reading))
            means = list(_means(contests, measure, reading))
            lower = measure == "loss"
            ranks = mean_ranks(by_cell, lower=lower), mean_ranks(means, lower=lower)
            if ranks[0] is not None and ranks[1] is not None:
                found.append(
                    RankedReading(
                        measure=measure, reading=reading, by_cell=ranks[0], by_contest=ranks[1]
                    )
                )
    return found


def _blocks(contests: Sequence[Contest], measure: str, reading: str) -> Iterator[Values]:
    for contest in contests:
        for seed in _shared_seeds(contest, measure, reading):
            block = {arm.name: arm.readings[measure, reading][seed] for arm in contest.arms}
            if not all(math.isnan(value) for value in block.values()):
                yield block


def _means(contests: Sequence[Contest], measure: str, reading: str) -> Iterator[Values]:
    for contest in contests:
        seeds = _shared_seeds(contest, measure, reading)
        block = {
            arm.name: mean([arm.readings[measure, reading][seed] for seed in seeds])
            for arm in contest.arms
        }
        if seeds and not all(math.isnan(value) for value in block.values()):
            yield block


def _shared_seeds(contest: Contest, measure: str, reading: str) -> list[str]:
    """Return the seeds for which all arms have a value, so that unfinished grids are comparable."""
    first, *others = (arm.readings.get((measure, reading), {}) for arm in contest.arms)
    return [seed for seed in first if all(seed in each for each in others)]
