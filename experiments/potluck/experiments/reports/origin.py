"""The line above an experiment's report: what its runs trained, and Potluck's version."""

from __future__ import annotations

from collections.abc import Iterable

from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.deploy.view.readable import readable_count
from potluck.experiments.reports.experiment_summary import Summary

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
