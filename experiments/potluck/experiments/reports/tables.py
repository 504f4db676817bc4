"""An experiment's results as tables: tidy tables for programs, Markdown for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from potluck.common.errors import StorageError
from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.deploy.view.readable import readable_bytes, readable_count, readable_seconds
from potluck.experiments.grid.results import CellResult, RoundResult
from potluck.experiments.reports.experiment_summary import Arm, PairedTest, Summary
from potluck.experiments.reports.ranks import holm

# The line above a report --------------------------------------------------------------------------

_MOST_NAMED = 4


def origin(summary: Summary) -> str:
    """Return the line: task, model, selector, strategy, objective, rounds and version of all cells.

    If cells differ, all values are listed in cell order.
    """
    runs = [_run_of(arm.cells[0].run_file) for arm in summary.arms]  # equal for all seeds
    named = {
        "task": (run.task.name for run in runs),
        "model": (run.model.name for run in runs if run.model is not None and run.model.name),
        "selector": (run.selector.name for run in runs),
        "strategy": (run.strategy.name for run in runs),
        "objective": (" + ".join(each.name for each in run.objective) for run in runs),
    }
    parts = [text for kind, names in named.items() if (text := _listed(kind, names))]
    rounds = dict.fromkeys(run.rounds for run in runs)
    parts.append(
        readable_count(next(iter(rounds)), "round")
        if len(rounds) == 1
        else f"{_some(map(str, rounds))} rounds"
    )
    versions = [cell.version or "of unknown version" for arm in summary.arms for cell in arm.cells]
    parts.append(f"Potluck {_some(sorted(set(versions)))}")
    if summary.quick:
        parts.append("quick: cut down by the [quick] table")
    return " · ".join(parts)


def _run_of(run_file: str) -> RunFile:
    return parse_run_file(run_file, source="a cell's run file")


def _listed(kind: str, names: Iterable[str]) -> str:
    """Return a list such as `strategies fedavg, fednova`; empty for no names."""
    found = list(dict.fromkeys(names))
    if len(found) > 1:
        kind = "strategies" if kind == "strategy" else f"{kind}s"
    return f"{kind} {_some(found)}" if found else ""


def _some(names: Iterable[str]) -> str:
    found = list(names)
    rest = len(found) - _MOST_NAMED
    return ", ".join(found[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# Tables -------------------------------------------------------------------------------------------

_METRICS = ("accuracy", "worst_group_accuracy", "weighted_f1", "loss")
_TITLES = {
    "accuracy": "Accuracy",
    "worst_group_accuracy": "Worst-group accuracy",
    "weighted_f1": "Weighted F1",
    "loss": "Loss",
}


def tidy_rows(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return one row per cell and round; numbers are rounded, so that repetitions agree."""
    return [
        {
            **cell.labels,
            "round": each.round,
            **{metric: getattr(each, metric) for metric in _METRICS},
            "entropy_bits": each.entropy,
            "selected": len(each.selected),
            "included": len(each.included),
            "bytes_down": each.bytes_down,
            "bytes_up": each.bytes_up,
            "downloads": each.downloads,
            "simulated_seconds": each.simulated_seconds,
            "worst_tenth": each.worst_tenth,
            **{
                f"{metric}_{name}": value
                for metric in (*_METRICS, "worst_tenth")
                for name, value in _behind(each, metric).items()
            },
            "cohort": " ".join(each.included),
        }
        for cell in results
        for each in cell.rounds
    ]


def _behind(result: RoundResult, metric: str) -> dict[str, int | bool | None]:
    """Return the numbers of clients and samples behind a metric, by column; None if unknown."""
    if metric not in result.coverage:
        return dict.fromkeys(("clients", "asked", "samples", "partial"))
    return result.coverage[metric].model_dump()


def timing_rows(results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return one row per cell and round with its seconds, which vary between repetitions."""
    return [
        {**cell.labels, "round": each.round, "seconds": seconds}
        for cell in results
        for each, seconds in zip(cell.rounds, cell.timings.rounds, strict=True)
    ]


def write_tables(results: Sequence[CellResult], folder: Path) -> None:
    """Write rounds.parquet, rounds.csv and timings.csv. Raises StorageError."""
    rounds = pa.Table.from_pylist(tidy_rows(results))
    timings = pa.Table.from_pylist(timing_rows(results))
    try:
        parquet.write_table(rounds, folder / "rounds.parquet")
        csv.write_csv(rounds, folder / "rounds.csv")
        csv.write_csv(timings, folder / "timings.csv")
    except OSError as error:
        raise StorageError(f"can't write the tables to {folder}: {error}", path=folder) from None


def markdown(summary: Summary) -> str:
    """Return the results in Markdown: a table of the metric, and a table of the costs."""
    experiment = summary.experiment
    reading = experiment.reading
    parts = [f"# {experiment.title or experiment.name}", "", f"{origin(summary)}.", ""]
    if experiment.text:
        parts += [experiment.text.strip(), ""]
    if summary.missing:
        parts += [f"**{readable_count(summary.missing, 'cell')} not finished yet.**", ""]
    over = "the last evaluation" if reading.last == 1 else f"the last {reading.last} evaluations"
    caption = (
        f"{_TITLES[reading.metric]}: mean over {over}, then mean ± standard deviation "
        f"over {readable_count(summary.seeds, 'seed')}; best **bold**, second <u>underlined</u>."
    )
    parts += [
        caption,
        "",
        *metric_table(summary),
        "",
        *comparison_table(summary),
        "",
        *[f"- {note}" for note in notes(summary)],
    ]
    return "\n".join(parts).rstrip() + "\n"


def metric_table(summary: Summary) -> list[str]:
    """Return the metric's table: rows are arms, columns are labels of axis `reading.columns`."""
    column_axis = summary.experiment.reading.columns
    axes = [axis for axis in summary.experiment.axes if axis != column_axis]
    columns = list(
        dict.fromkeys(arm.labels[column_axis] if column_axis else "" for arm in summary.arms)
    )
    cells: dict[tuple[str, ...], dict[str, Arm]] = {}
    for arm in summary.arms:
        row = tuple(arm.labels[axis] for axis in axes)
        cells.setdefault(row, {})[arm.labels[column_axis] if column_axis else ""] = arm
    title = _TITLES[summary.experiment.reading.metric]
    heads = [f"{column_axis} = {column}" if column_axis else title for column in columns]
    ranks = {
        column: ranked(
            [row[column].mean for row in cells.values() if column in row],
            lower=summary.experiment.reading.metric == "loss",
        )
        for column in columns
    }
    lines = [line([*axes, *heads]), rule(len(axes), len(columns))]
    for row, arms in cells.items():
        values = [
            "–" if column not in arms else ranks[column](arms[column].mean, _value(arms[column]))
            for column in columns
        ]
        lines.append(line([*row, *values]))
    return lines


def ranked(values: Sequence[float], *, lower: bool) -> Callable[[float, str], str]:
    """Return a function that marks a text by its value's rank: best bold, second underlined.

    Equal values have equal marks.
    """
    known = sorted(
        {round(value, 9) for value in values if not math.isnan(value)}, reverse=not lower
    )

    def mark(value: float, text: str) -> str:
        if math.isnan(value) or len(values) < 2:
            return text
        place = known.index(round(value, 9))
        return f"**{text}**" if place == 0 else f"<u>{text}</u>" if place == 1 else text

    return mark


def comparison_table(summary: Summary) -> list[str]:
    """Return each arm's costs, and its comparison with the baseline and with published figures."""
    axes = list(summary.experiment.axes)
    reading = summary.experiment.reading
    tested = any(arm.test for arm in summary.arms)
    published = any(arm.published for arm in summary.arms)
    heads = [*axes, "seeds", "clients a round", "entropy, bits", "bytes"]
    heads += ["against the baseline", "p", "p, Holm"] if tested else []
    heads += ["published"] if published else []
    heads += [f"to {target:g}: round, bytes" for target in reading.targets]
    corrected = _corrected(summary)
    lines = [line(heads), rule(len(axes), len(heads) - len(axes))]
    for number, arm in enumerate(summary.arms):
        row = [*arm.labels.values(), str(len(arm.values))]
        row += [f"{arm.clients:.4g}{'' if arm.same_cohorts else ' ≠'}", f"{arm.entropy:.3f}"]
        row += [readable_bytes(arm.bytes)]
        row += [*_tested(arm.test), corrected.get(number, "–")] if tested else []
        row += ["; ".join(_published(arm)) or "–"] if published else []
        row += [
            "–"
            if cost.round is None or cost.bytes is None
            else f"{cost.round:.4g}, {readable_bytes(cost.bytes)}"
            + ("" if cost.reached == len(arm.values) else f" ({cost.reached} of {len(arm.values)})")
            for cost in arm.costs
        ]
        lines.append(line(row))
    return lines


def notes(summary: Summary) -> Iterator[str]:
    """Yield the notes that a reader needs to judge the tables."""
    experiment = summary.experiment
    if experiment.reading.baseline:
        named = experiment.reading.baseline.items()
        base = ", ".join(f"{axis} = {value}" for axis, value in named)
        yield (
            f"The baseline is {base}, all else equal. Differences are paired by seed, with the "
            "95 % confidence interval of their mean; p is that of a two-sided paired t test, "
            "beside it as Holm corrects it for all tests against the same arm. "
            f"{readable_count(summary.seeds, 'seed')} can show large differences only."
        )
        if not all(arm.same_cohorts for arm in summary.arms):
            yield (
                "≠ marks arms whose cohorts are of another size than the baseline's: what they "
                "gain may come from more clients a round. Compare them with an arm of that size."
            )
    yield from _coverage_notes(summary)
    stopped = [cell for arm in summary.arms for cell in arm.cells if cell.stopped_early]
    if stopped:
        rounds = [len(cell.rounds) for cell in stopped]
        spread = f"{min(rounds)}" if len(set(rounds)) == 1 else f"{min(rounds)} to {max(rounds)}"
        yield (
            f"{readable_count(len(stopped), 'cell')} stopped early, as [stop] says, after {spread} "
            "rounds: bytes are of these, and a picture of the metric holds a cell's last value."
        )
    if any(arm.published for arm in summary.arms):
        yield "Published figures are the papers' own, with their models, data and rounds."
    for each in experiment.assumptions():
        yield f"Not from the paper: `{each.key}`: {each.reason}."


def _coverage_notes(summary: Summary) -> Iterator[str]:
    """Yield notes on the clients behind the metric, and on partial evaluations."""
    metric = summary.experiment.reading.metric
    rounds = [each for arm in summary.arms for cell in arm.cells for each in cell.rounds]
    measured = [each for each in rounds if getattr(each, metric) is not None]
    behind = [each.coverage[metric] for each in measured if metric in each.coverage]
    if behind:
        ranges = [
            f"{_range([getattr(each, name) for each in behind])} {name}"
            for name in ("clients", "samples")
            if any(getattr(each, name) for each in behind)
        ]
        yield f"{_TITLES[metric]} is over {' and '.join(ranges)} in each evaluation."
    partial = sum(each.is_partial(metric) for each in measured)
    if partial:
        yield (
            f"{partial} of {readable_count(len(measured), 'evaluation')} are **partial**: fewer of "
            "the clients asked than evaluation.least_share measured the model. They are in the "
            "means, and count neither as best nor as reaching a target."
        )
    failed = sum(
        not each.coverage[metric].clients and each.coverage[metric].asked > 0
        for each in rounds
        if metric in each.coverage
    )
    if failed:
        yield f"No client could measure the model in {readable_count(failed, 'evaluation')}."


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def timing_line(summary: Summary) -> str:
    """Return the time of all cells as text; it is not in the tables, since it varies."""
    total = sum(cell.timings.total for arm in summary.arms for cell in arm.cells)
    return f"{readable_seconds(total)} of federations, one after another"


def _value(arm: Arm) -> str:
    if math.isnan(arm.mean):
        return "–"
    deviation = "" if arm.deviation is None else f" ± {arm.deviation:.4f}"
    return f"{arm.mean:.4f}{deviation}{' (partial)' * arm.partial}"


def _tested(test: PairedTest | None) -> tuple[str, str]:
    if test is None or math.isnan(test.difference):
        return "–", "–"
    interval = "" if test.low is None else f" [{test.low:+.4f}, {test.high:+.4f}]"
    return f"{test.difference:+.4f}{interval}", "–" if test.p is None else f"{test.p:.2g}"


def _corrected(summary: Summary) -> dict[int, str]:
    """Return p values by arm index, after Holm's correction over tests against one baseline."""
    named = summary.experiment.reading.baseline
    families: dict[tuple[str, ...], dict[int, float | None]] = {}
    for number, arm in enumerate(summary.arms):
        if arm.test is not None:
            family = tuple(value for axis, value in arm.labels.items() if axis not in named)
            families.setdefault(family, {})[number] = arm.test.p
    return {
        number: f"{p:.2g}" for family in families.values() for number, p in holm(family).items()
    }


def _published(arm: Arm) -> Iterator[str]:
    for each in arm.published:
        deviation = "" if each.deviation is None else f" ± {each.deviation:g}"
        yield f"{each.value:g}{deviation}" + (f" ({each.source})" if each.source else "")


def line(entries: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(entry.replace("|", "\\|") for entry in entries) + " |"


def rule(labels: int, numbers: int) -> str:
    """Return the line below a table's head: first columns of text, then columns of numbers."""
    return line(["---"] * labels + ["---:"] * numbers)
