"""Differences between all pairs of an experiment's arms, by seed, for docs/research.

    .venv/bin/python tools/paired_differences.py experiments/flash-table.toml FOLDER --quick

FOLDER holds the results of `potluck experiment`, finished or not. A report tests all arms against
one baseline. This program compares all pairs of arms at their last evaluations, at their best
evaluations, and at equal bytes and equal simulated seconds. It prints mean differences with 95 %
intervals. There is no correction for the number of pairs. --axis names the axis whose arms are
compared, instead of `reading.compared`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from potluck.experiments.grid.definition import ExperimentFile, load_experiment, seeds_in
from potluck.experiments.grid.grid_cells import cells_of
from potluck.experiments.grid.results import ResultsFolder
from potluck.experiments.reports.contests import BEST, EQUAL, LAST, Contest, contests_of
from potluck.experiments.reports.experiment_summary import Summary, paired_test, summarise
from potluck.experiments.reports.readings import BUDGETS
from potluck.experiments.reports.tables import line, rule

READINGS = (LAST, BEST, *(EQUAL + name for name in BUDGETS if name != "rounds"))


def main() -> None:
    """Print a table for each contest and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="experiment file")
    parser.add_argument("folder", type=Path, help="folder of its results")
    parser.add_argument(
        "--quick", action="store_true", help="the results come from `potluck experiment --quick`"
    )
    parser.add_argument("--seeds", type=seeds_in, help="other seeds than the file's, such as 0-9")
    parser.add_argument("--axis", help="axis whose arms are compared")
    parser.add_argument("--measure", help="metric to compare, instead of the file's")
    options = parser.parse_args()
    plan = load_experiment(options.file, quick=options.quick, seeds=options.seeds)
    if options.axis:
        if options.axis not in plan.axes:
            parser.error(f"--axis {options.axis}: the file's axes are {', '.join(plan.axes)}")
        reading = plan.reading.model_copy(update={"compared": options.axis})
        plan = plan.model_copy(update={"reading": reading})
    summary = summary_of(plan, options.file, options.folder)
    measure = options.measure or plan.reading.metric
    found = contests_of(summary)
    if not any(
        (measure, each) in arm.readings for c in found for arm in c.arms for each in READINGS
    ):
        sys.exit(
            f"{options.folder} has no finished cell of {options.file} with the metric {measure}; "
            "name the folder, --quick and --seeds as for potluck experiment"
        )
    for contest in found:
        lines = pair_table(contest, measure)
        sys.stdout.write("\n".join([*lines, "", ""]))


def summary_of(plan: ExperimentFile, source: Path, folder: Path) -> Summary:
    """Return the summary of an experiment's finished cells."""
    cells = cells_of(plan, hosts=plan.hosts, source=source)
    results = ResultsFolder(folder).finished(cells)
    done = [
        results[cell.digest].model_copy(update={"labels": dict(cell.labels)})
        for cell in cells
        if cell.digest in results
    ]
    return summarise(plan, done, len(cells) - len(done))


def pair_table(contest: Contest, measure: str) -> Iterator[str]:
    """Yield a table with a row for each pair of arms, and a column for each known reading."""
    shown = [
        reading
        for reading in READINGS
        if any(_known(arm.readings.get((measure, reading), {})) for arm in contest.arms)
    ]
    yield f"{contest.title or 'All'}: {measure}"
    yield ""
    yield line(["arms", *shown])
    yield rule(1, len(shown))
    for first, second in itertools.combinations(contest.arms, 2):
        cells = [
            difference(second.readings[measure, reading], first.readings[measure, reading])
            for reading in shown
        ]
        yield line([f"{second.name} − {first.name}", *cells])


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> str:
    """Return the mean difference as text, with its interval, its p and the number of pairs."""
    test = paired_test(first, second)
    if test is None or math.isnan(test.difference):
        return "–"
    if test.low is None or test.p is None:
        return f"{test.difference:+.4f} ({test.pairs})"
    interval = f"[{test.low:+.4f}, {test.high:+.4f}]"
    return f"{test.difference:+.4f} {interval} p {test.p:.2g} ({test.pairs})"


def _known(values: Mapping[str, float]) -> bool:
    return any(not math.isnan(each) for each in values.values())


if __name__ == "__main__":
    main()
