"""Results of arms: scores of their cells, and the files that hold them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from potluck.common.errors import ConfigurationError, RunError, StorageError
from potluck.common.run_file.runfile import parse_run_file
from potluck.common.settings import plugins
from potluck.experiments.benchmark.tier import Tier, TierName, follows_tuning
from potluck.experiments.grid.definition import Reading
from potluck.experiments.grid.results import SAMPLES, SECONDS, CellResult
from potluck.experiments.reports.readings import (
    WORST_TENTH,
    mean,
    reached,
    reading_of,
    spent_bytes,
    spent_seconds,
)
from potluck.server.selection import Selector

FORMAT: Literal[2] = 2
"""Version of the result files."""

# Records ------------------------------------------------------------------------------------------


Share = Annotated[float, Field(ge=0, le=1)]
Cost = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Outlay(BaseModel):
    """Costs of a cell until a round.

    bytes: as if each client were on its own machine. seconds: simulated. client_seconds: simulated
    seconds of all selected clients together. Unknown costs are None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: PositiveInt
    bytes: Cost | None
    seconds: Cost | None
    client_seconds: Cost | None


class CellScore(BaseModel):
    """Scores of an arm in a workload with a seed.

    Metrics are means over the last evaluations, shares in [0, 1]; None if not evaluated.
    to_target: costs until the target was reached; None if it was not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: str
    seed: int
    accuracy: Share
    worst_group: Share | None
    worst_tenth: Share | None
    to_target: Outlay | None


class ArmResult(BaseModel):
    """Result of an arm in a tier; a file of the leaderboard.

    rules: digest of the tier. data: SHA-256 of each data set that the workloads read, by name.
    software: version of Potluck. package: name and version of the package that the selector comes
    from; None if it comes with Potluck. options: the selector's options in all workloads. grid:
    option values from which the tried settings were drawn. tried: all settings that the tuning
    tried, by dotted key, the arm's own first. tuned: settings by workload that the tuning chose; a
    workload is omitted if `options` were best. training, targets: tuned training settings and
    targets by workload, which the baseline set. learns: data about clients that the selector uses,
    by kind. epsilon: privacy loss of a client by workload, for profiles with noise; None if
    profiles were exact. server_seconds: seconds of a selection among the tier's `server_clients`,
    with the slowest of the settings in `tuned`; None if it was not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = FORMAT
    tier: TierName
    rules: str = Field(pattern=r"^[0-9a-f]{64}$")
    arm: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    selector: str
    data: dict[str, str]
    software: str
    package: str | None = Field(pattern=r"^[^\s|]+ [^\s|]+$")
    options: dict[str, Any]
    grid: dict[str, list[Any]]
    tried: list[dict[str, Any]]
    tuned: dict[str, dict[str, Any]]
    training: dict[str, dict[str, Any]]
    targets: dict[str, float]
    learns: dict[str, list[str]]
    epsilon: dict[str, Loss | None]
    server_seconds: Seconds | None
    cells: list[CellScore]

    def values(self, workload: str, metric: str = "accuracy") -> dict[str, float]:
        """Return a metric by seed; NaN if not evaluated."""
        found = {each.seed: getattr(each, metric) for each in self.cells_in(workload)}
        return {str(seed): math.nan if v is None else float(v) for seed, v in found.items()}

    def cells_in(self, workload: str) -> list[CellScore]:
        """Return the cells of a workload, one per seed."""
        return [each for each in self.cells if each.workload == workload]

    def cost(self, workload: str, resource: str) -> float:
        """Return the median cost to the target over seeds; infinite if half of them miss it."""
        costs = [
            math.inf if each.to_target is None else getattr(each.to_target, resource)
            for each in self.cells_in(workload)
        ]
        return float(np.median([math.nan if cost is None else cost for cost in costs]))


# Scores -------------------------------------------------------------------------------------------


def score(cell: CellResult, workload: str, seed: int, target: float, reading: Reading) -> CellScore:
    """Return the scores of a finished cell. target: value of the metric that it must reach."""
    rounds, last = cell.rounds, reading.last

    def read(metric: str) -> float | None:
        value = reading_of(rounds, metric, last)
        return None if math.isnan(value) else round(value, 6)

    accuracy = reading_of(rounds, reading.metric, last)
    if math.isnan(accuracy):
        raise RunError(
            f"the run of workload {workload} with seed {seed} has no {reading.metric} at its last "
            "evaluations; look at its failed clients, and run it again"
        )
    first = reached(rounds, reading.metric, target)
    return CellScore(
        workload=workload,
        seed=seed,
        accuracy=round(accuracy, 6),
        worst_group=read("worst_group_accuracy"),
        worst_tenth=read(WORST_TENTH),
        to_target=None if first is None else _outlay(cell, first),
    )


def target_of(cells: Sequence[CellResult], tier: Tier) -> float:
    """Return the target of a workload: a share of the baseline's mean. cells: of the baseline."""
    values = [reading_of(each.rounds, tier.reading.metric, tier.reading.last) for each in cells]
    return round(tier.target * mean(values), 6)


def _outlay(cell: CellResult, number: int) -> Outlay:
    """Return the costs of a cell until the end of a round."""
    place = [each.round for each in cell.rounds].index(number)

    def until(spent: Sequence[float] | None) -> float | None:
        return None if spent is None else round(spent[place], 3)

    return Outlay(
        rounds=number,
        bytes=until(spent_bytes(cell)),
        seconds=until(spent_seconds(cell)),
        client_seconds=until(_client_seconds(cell)),
    )


def _client_seconds(cell: CellResult) -> Sequence[float] | None:
    """Return the simulated seconds of all selected clients by the end of each round.

    A client that drops out counts like the others, since it may have trained. None if clients have
    no fixed speed, or if the selector sets their passes or their numbers of samples.
    """
    chosen = parse_run_file(cell.run_file, source="a cell").selector
    selector = plugins.create(Selector, chosen.name, chosen.options)
    if SECONDS not in cell.traits or selector.sets_epochs or selector.sets_quotas:
        return None
    each = np.multiply(cell.traits[SAMPLES], cell.traits[SECONDS])
    rows = [[int(c.rpartition("-")[2]) for c in one.selected] for one in cell.rounds]
    return list(accumulate(float(each[of].sum()) for of in rows))


def learned_by(name: str, variants: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the data about clients that a selector declares to use with some options, by kind.

    variants: options; the result is the union over them. Raises PluginError.
    """
    found: dict[str, set[str]] = {}
    for options in variants:
        for kind, of in _declared(plugins.create(Selector, name, dict(options))).items():
            found.setdefault(kind, set()).update(map(str, of))
    return {kind: sorted(of) for kind, of in found.items() if of}


def _declared(selector: Selector) -> dict[str, Collection[str]]:
    return {
        "profiles": selector.needs_profiles,
        "answers": selector.asks_questions,
        "reports": selector.reports,
        "facts of updates": selector.needs_facts,
        "sums": {"label totals"} if selector.wants_label_totals else set[str](),
        "losses of means of updates": {"evaluation"} if selector.measures else set[str](),
    }


# Files --------------------------------------------------------------------------------------------


PUBLISHED: Traversable = resources.files("potluck.experiments.benchmark").joinpath("published")
"""Folder of the results that come with Potluck; it has a folder per tier."""


def published(tier: Tier, folder: Traversable = PUBLISHED) -> dict[str, ArmResult]:
    """Return the results of a tier that come with Potluck, by arm.

    folder: contains a folder of results per tier. Raises ConfigurationError.
    """
    of_tier = folder.joinpath(tier.name)
    if not of_tier.is_dir():
        return {}
    files = sorted((each for each in of_tier.iterdir()), key=lambda each: each.name)
    found = [read_result(each, tier) for each in files if each.name.endswith(".json")]
    return {each.arm: each for each in found}


def read_result(file: Traversable, tier: Tier) -> ArmResult:
    """Return a result file after checks against the schema and the tier.

    Raises ConfigurationError.
    """
    try:
        result = ArmResult.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"can't read {file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(
            f"{file} is not a result of the benchmark in format {FORMAT}: {where}: {first['msg']}; "
            "run the arm again with this version of potluck bench"
        ) from None
    if result.tier != tier.name or result.rules != tier.digest:
        raise ConfigurationError(
            f"{file} has results of other rules than those of tier {tier.name}; "
            f"{_again(result, tier)}"
        )
    if file.name != f"{result.arm}.json":
        raise ConfigurationError(
            f"{file} has results of {result.arm}; rename the file to {result.arm}.json"
        )
    if broken := next(_broken_rules(result, tier), None):
        raise ConfigurationError(f"{file} {broken}; {_again(result, tier)}")
    return result


def _again(result: ArmResult, tier: Tier) -> str:
    """Return how to repeat a result. Arms of other packages have no grid in the tier."""
    grid = " and the same --grid" if result.grid and result.package else ""
    return f"run the arm again with potluck bench {result.arm} --tier {tier.name}{grid}"


def _broken_rules(result: ArmResult, tier: Tier) -> Iterator[str]:
    """Yield the rules of its tier that a result breaks, as predicates."""
    if not follows_tuning(tier, result.arm, result.grid, result.tried):
        yield (
            f"has tried settings that are not the arm's own and up to {tier.tuning.settings - 1} "
            "drawn from its grid"
        )
    chosen = result.training if result.arm == tier.baseline else result.tuned
    if any(setting not in result.tried for setting in chosen.values()):
        yield "has tuned settings that were not tried"
    if result.epsilon.keys() != tier.workloads.keys():
        yield "must have an epsilon, or null, for each workload"
    wanted = {(name, seed) for name in tier.workloads for seed in tier.seeds}
    cells = [(each.workload, each.seed) for each in result.cells]
    if len(cells) != len(wanted) or set(cells) != wanted:
        yield "must have one cell for each workload and seed of the tier"
        return
    for each in result.cells:
        most = tier.rounds(each.workload)
        if each.to_target is not None and each.to_target.rounds > most:
            yield f"reaches a target after {each.to_target.rounds} rounds, but the run has {most}"


def write_result(result: ArmResult, folder: Path) -> Path:
    """Write a result file and return its path. Raises StorageError."""
    path = folder / f"{result.arm}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path}: {error.strerror}", path=path) from None
    return path
