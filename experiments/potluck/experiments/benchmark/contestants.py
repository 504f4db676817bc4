"""Tunes and scores arms of a tier. Cells are run by a function that the caller gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from potluck.common.errors import ConfigurationError, RunError
from potluck.common.learning.task_loading import make_task
from potluck.common.settings import plugins
from potluck.experiments.benchmark.selection_time import server_seconds
from potluck.experiments.benchmark.standing import (
    ArmResult,
    learned_by,
    score,
    target_of,
)
from potluck.experiments.benchmark.tier import (
    Choice,
    Tier,
    TierName,
    Trial,
    option_choices,
    training_choices,
    trial_cells,
)
from potluck.experiments.data_sets.prepare import data_sets_of, stored_sha256
from potluck.experiments.grid.definition import merged
from potluck.experiments.grid.grid_cells import Cell, other_package
from potluck.experiments.grid.results import CellResult
from potluck.experiments.reports.readings import mean, reading_of
from potluck.server.selection import Selector

RunCells = Callable[[Sequence[Cell], str], Mapping[str, CellResult]]
"""Function that runs those cells that have no result yet, and returns the results of all finished
cells, by digest. The second argument says what the cells are for: "tuning" or "results"."""

Choices = dict[str, dict[str, Any]]
"""Changes to a workload's run, by workload."""


def run_arms(
    tier: Tier,
    arms: Sequence[str],
    baseline: ArmResult | None,
    run: RunCells,
    *,
    data: Mapping[str, str],
) -> list[ArmResult]:
    """Tune and score some arms. Return their results, after the baseline's if it was run.

    baseline: stored result of the baseline; None to run it first. data: SHA-256 of each data set
    that the workloads read, by name. Raises RunError if a cell failed, PluginError or
    ConfigurationError if an arm can't run or the baseline read other data.
    """
    others = [name for name in dict.fromkeys(arms) if name != tier.baseline]
    for name in others:  # raises before the work begins
        _selector(tier, name)
    if baseline is not None and tier.baseline not in arms:
        _check_data(data, baseline)
    found: list[ArmResult] = []
    if baseline is None or tier.baseline in arms:
        tried = training_choices(tier)
        tuned = _tuned(tier, {tier.baseline: tried}, {}, run)[tier.baseline]
        training = _spread(tier, tuned)
        cells = _finals(tier, {tier.baseline: training}, run)[tier.baseline]
        targets = {name: target_of(of, tier) for name, of in cells.items()}
        untuned: Choices = {name: {} for name in tier.workloads}
        baseline = _result(tier, tier.baseline, tried, untuned, training, targets, cells, data=data)
        found.append(baseline)
    training, targets = baseline.training, baseline.targets
    tries = {name: option_choices(tier, name) for name in others}
    tuned_options = _tuned(tier, tries, training, run)
    options = {name: _spread(tier, tuned_options[name]) for name in others}
    changes = {
        name: {each: {**training[each], **of[each]} for each in tier.workloads}
        for name, of in options.items()
    }
    for name, of_arm in _finals(tier, changes, run).items():
        found.append(
            _result(tier, name, tries[name], options[name], training, targets, of_arm, data=data)
        )
    return found


def data_digests(tier: Tier, folder: Path | None) -> dict[str, str]:
    """Return the SHA-256 of each data set that the workloads of a tier read, by name.

    folder: data directory. Raises ConfigurationError if a file is missing or invalid.
    """
    names = set[str]()
    for workload in tier.workloads.values():
        options = dict(merged(tier.run, workload.run)["task"])
        names.update(data_sets_of(make_task(options.pop("name"), options)))
    if names and folder is None:
        first, listed = min(names), ", ".join(sorted(names))
        raise ConfigurationError(
            f"tier {tier.name} needs the data sets {listed}, but there is no folder `data`; create "
            f"each with `potluck data prepare {first} --from FOLDER`, or name a folder with --data"
        )
    return {name: stored_sha256(name, folder) for name in sorted(names)}


def _check_data(data: Mapping[str, str], baseline: ArmResult) -> None:
    """Raise ConfigurationError if the baseline read other data sets than these."""
    other = [name for name, digest in baseline.data.items() if data.get(name) != digest]
    if other:
        raise ConfigurationError(
            f"the published results are of other data than your {', '.join(other)}; write the file "
            f"again with potluck data prepare {other[0]}"
        )


def _spread(tier: Tier, tuned: Choices) -> Choices:
    """Return settings for all workloads; a harder variant has those of its easier workload."""
    return {name: tuned[each.harder or name] for name, each in tier.workloads.items()}


def _tuned(
    tier: Tier,
    tries: Mapping[str, Sequence[Choice]],
    training: Choices,
    run: RunCells,
) -> dict[str, Choices]:
    """Return the best settings of each arm by ranked workload. A single setting is not run.

    Of equally good settings, the first is chosen.
    """
    trials = [
        (name, workload, choice)
        for name, choices in tries.items()
        if len(choices) > 1
        for workload in tier.ranked
        for choice in choices
    ]
    made = [
        Trial(arm=name, workload=workload, choice={**training.get(workload, {}), **choice})
        for name, workload, choice in trials
    ]
    results = _run(tier, made, tier.tuning.seeds, "tuning", run)
    best: dict[tuple[str, str], tuple[float, Choice]] = {}
    for (name, workload, choice), cells in zip(trials, results, strict=True):
        value = mean([_read(tier, each) for each in cells])
        value = -value if tier.reading.metric == "loss" else value
        held = best.get((name, workload))
        if held is None or value > held[0] or (math.isnan(held[0]) and not math.isnan(value)):
            best[name, workload] = value, choice
    return {
        name: {
            workload: dict(best[name, workload][1] if (name, workload) in best else choices[0])
            for workload in tier.ranked
        }
        for name, choices in tries.items()
    }


def _finals(
    tier: Tier, changes: Mapping[str, Choices], run: RunCells
) -> dict[str, dict[str, list[CellResult]]]:
    """Return the finished cells of the arms by workload, in the order of the tier's seeds."""
    trials = [
        Trial(arm=name, workload=workload, choice=of[workload])
        for name, of in changes.items()
        for workload in tier.workloads
    ]
    found: dict[str, dict[str, list[CellResult]]] = {}
    for trial, cells in zip(trials, _run(tier, trials, tier.seeds, "results", run), strict=True):
        found.setdefault(trial.arm, {})[trial.workload] = cells
    return found


def _run(
    tier: Tier, trials: Sequence[Trial], seeds: Iterable[int], purpose: str, run: RunCells
) -> list[list[CellResult]]:
    """Return the results of each trial, in the order of `seeds`. Raises RunError if one is
    missing."""
    planned = trial_cells(tier, trials, tuple(seeds))
    cells = [cell for of in planned for cell in of]
    results = run(cells, purpose) if cells else {}
    missing = [cell.title for cell in cells if cell.digest not in results]
    if missing:
        raise RunError(
            f"{len(missing)} of {len(cells)} cells failed, the first: {missing[0]}; the same "
            "command tries them again"
        )
    return [[results[cell.digest] for cell in of] for of in planned]


def _read(tier: Tier, cell: CellResult) -> float:
    return reading_of(cell.rounds, tier.reading.metric, tier.reading.last)


def _selector(tier: Tier, name: str) -> Selector:
    arm = tier.arm(name)
    return plugins.create(Selector, arm.selector or name, arm.options)


def _options(choice: Choice) -> dict[str, Any]:
    """Return the selector's options in a choice of dotted keys."""
    prefix = "selector."
    return {key.removeprefix(prefix): v for key, v in choice.items() if key.startswith(prefix)}


def seconds_of(selector: str, variants: Sequence[Mapping[str, Any]], clients: int) -> float | None:
    """Return the processor seconds of a selection with the slowest of some options.

    Three significant digits. None if one of the variants can't be measured. variants: options.
    """
    slowest = 0.0
    distinct: list[Mapping[str, Any]] = []
    for options in variants:
        if options not in distinct:
            distinct.append(options)
    for options in distinct:
        seconds = server_seconds(plugins.create(Selector, selector, dict(options)), clients)
        if seconds is None:
            return None
        slowest = max(slowest, seconds)
    return float(f"{slowest:.3g}")


def measured_again(tier: Tier, result: ArmResult) -> ArmResult:
    """Return the result with the seconds of a selection measured on this machine."""
    variants = [
        {**result.options, **_options(result.tuned.get(workload, {}))}
        for workload in tier.workloads
    ]
    seconds = seconds_of(result.selector, variants, tier.server_clients)
    return result.model_copy(update={"server_seconds": seconds})


def _result(
    tier: Tier,
    name: str,
    tried: Sequence[Choice],
    tuned: Choices,
    training: Choices,
    targets: dict[str, float],
    cells: Mapping[str, Sequence[CellResult]],
    *,
    data: Mapping[str, str],
) -> ArmResult:
    arm = tier.arm(name)
    selector = arm.selector or name
    variants = [{**arm.options, **_options(of)} for of in tuned.values()]
    return ArmResult(
        tier=cast(TierName, tier.name),
        rules=tier.digest,
        arm=name,
        selector=selector,
        data=dict(data),
        software=", ".join(sorted({cell.version for of in cells.values() for cell in of})),
        package=other_package(plugins.SELECTORS, selector),
        options=dict(arm.options),
        grid=dict(arm.grid),
        tried=[dict(each) for each in tried],
        tuned={each: of for each, of in tuned.items() if of},
        training=training,
        targets=targets,
        learns=learned_by(selector, variants),
        epsilon={workload: of[0].epsilon for workload, of in cells.items()},
        server_seconds=seconds_of(selector, variants, tier.server_clients),
        cells=[
            score(cell, workload, seed, targets[workload], tier.reading)
            for workload, of in cells.items()
            for seed, cell in zip(tier.seeds, of, strict=True)
        ],
    )
