"""A tier of the benchmark: its workloads, its rules, and the cells that an arm needs."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.settings import plugins
from potluck.common.settings.configuration import Settings, parse_toml, validate
from potluck.common.settings.wanted import meant
from potluck.experiments.grid.definition import ExperimentFile, Reading, merged
from potluck.experiments.grid.grid_cells import Cell, cells_of
from potluck.server.selection import Selector

Choice = Mapping[str, Any]
"""Values of a run file by dotted key, such as training.learning_rate."""

ARM, WORKLOAD = "arm", "workload"
"""Names of the two axes by which cells differ, in addition to the seed."""


class Workload(Settings):
    """A workload, in which all arms run."""

    run: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to the tier's `run` for this workload, as in a run file.",
    )
    harder: str | None = Field(
        default=None,
        description="Name of another workload, of which this workload is a harder version. The\n"
        "settings tuned for the other workload are used, and the loss against that\n"
        "workload is reported instead of a rank.",
    )
    start_seconds: float = Field(
        ge=0, description="Processor seconds that the start of a cell takes, for estimates."
    )
    round_seconds: float = Field(
        ge=0, description="Processor seconds that a round with the baseline takes, for estimates."
    )


class TierArm(Settings):
    """An arm of a tier: a selector, its options, and what its tuning may change."""

    selector: str | None = Field(
        default=None, description="Name of the selector. Unset: the arm's name."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the selector.")
    grid: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Values of the selector's options among which the tuning chooses.",
    )


class Tuning(Settings):
    """Budget of the tuning, which is the same for every arm."""

    seeds: tuple[int, ...] = Field(
        min_length=1,
        description="Seeds for the tuning; they must differ from the seeds of the results.",
    )
    settings: int = Field(
        ge=1,
        description="Number of settings tried per arm and workload: the arm's options, then\n"
        "settings drawn from its grid.",
    )
    training: dict[str, list[Any]] = Field(
        default_factory=dict,
        description="Grid of training settings, which are tuned with the baseline alone. All\n"
        "arms then train with the best settings.",
    )


class Tier(Settings):
    """A tier of the benchmark."""

    kind = "a tier of the benchmark"

    name: str = Field(pattern=r"^[a-z][a-z-]*$", description="Name of the tier.")
    title: str = Field(description="Purpose of the tier, in one line.")
    seeds: tuple[int, ...] = Field(
        min_length=1, description="Seeds of the runs from which results are computed."
    )
    hosts: int = Field(default=1, ge=1, description="Number of client processes of each cell.")
    baseline: str = Field(description="Arm with which the others are compared.")
    target: float = Field(
        gt=0,
        le=1,
        description="Share of the tuned baseline's last metric that counts as the target for\n"
        "arms.",
    )
    server_clients: int = Field(
        ge=1, description="Number of clients with which the seconds of a selection are measured."
    )
    tuning: Tuning = Field(description="Budget of the tuning.")
    reading: Reading = Field(description="How a cell's rounds are reduced to one number.")
    run: dict[str, Any] = Field(
        description="Settings that the runs of all workloads share, as in a run file."
    )
    disclosure: dict[str, Any] = Field(
        default_factory=dict, description="The [disclosure] table of all hosts."
    )
    workloads: dict[str, Workload] = Field(
        min_length=1, description="Workloads of the benchmark, by name."
    )
    arms: dict[str, TierArm] = Field(
        min_length=1, description="Arms, that is selectors with options, by name."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.baseline not in self.arms:
            raise ValueError(f"baseline: there is no arm '{self.baseline}'")
        if set(self.seeds) & set(self.tuning.seeds):
            raise ValueError("tuning.seeds must differ from seeds")
        for name, workload in self.workloads.items():
            easier = workload.harder
            if easier is not None and (
                easier not in self.workloads or self.workloads[easier].harder is not None
            ):
                raise ValueError(
                    f"workloads.{name}.harder: '{easier}' is not a workload of its own"
                )
        return self

    @property
    def ranked(self) -> list[str]:
        """Names of the workloads that count in ranks and performance profiles: all but harder
        variants."""
        return [name for name, each in self.workloads.items() if each.harder is None]

    @property
    def digest(self) -> str:
        """SHA-256 of everything that results depend on, except arms; results with equal digests are
        comparable."""
        # Omit defaults, so that a key that is added later does not change the digest.
        omitted = {"title", "arms", "server_clients"}
        values = self.model_dump(mode="json", exclude=omitted, exclude_defaults=True)
        for workload in values["workloads"].values():
            for key in ("start_seconds", "round_seconds"):
                workload.pop(key, None)
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def rounds(self, workload: str) -> int:
        """Return the number of rounds of a workload's runs."""
        found: int = merged(self.run, self.workloads[workload].run).get("rounds", 0)
        return found

    def arm(self, name: str) -> TierArm:
        """Return an arm; for other selectors, an arm with the default options and no grid."""
        return self.arms.get(name, TierArm())


# Files --------------------------------------------------------------------------------------------

_FOLDER = resources.files("potluck.experiments.benchmark").joinpath("tiers")
TIERS: tuple[str, ...] = ("smoke", "standard", "full")
"""Names of the tiers, the quickest first."""
TierName = Literal["smoke", "standard", "full"]


def is_published(tier: str, arm: str) -> bool:
    """Return True if the result of an arm comes with Potluck."""
    folder = resources.files("potluck.experiments.benchmark").joinpath("published", tier)
    return folder.joinpath(f"{arm}.json").is_file()


def tier_named(name: str) -> Tier:
    """Return a tier. Raises ConfigurationError with the known names if it does not exist."""
    if name not in TIERS:
        raise ConfigurationError(
            f"there is no tier '{name}'{meant(name, TIERS)}; there are: {', '.join(TIERS)}",
            name=name,
        )
    text = _FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return validate(Tier, {"name": name, **tomllib.loads(text)}, source=f"tier {name}")


# Cells --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An arm in a workload, with changes to the workload's run.

    choice: values by dotted key.
    """

    arm: str
    workload: str
    choice: Choice


def trial_cells(tier: Tier, trials: Sequence[Trial], seeds: Sequence[int]) -> list[list[Cell]]:
    """Return the cells of each trial, in the order of `seeds`.

    Raises ConfigurationError or PluginError if a coordinator would refuse a cell's run.
    """
    return [_cells(tier, trial, seeds) for trial in trials]


def _cells(tier: Tier, trial: Trial, seeds: Sequence[int]) -> list[Cell]:
    arm = tier.arm(trial.arm)
    selector = {"name": arm.selector or trial.arm, **arm.options}
    # A dotted key is set after the tables, so that it wins.
    run = {**tier.workloads[trial.workload].run, **trial.choice}
    plan = ExperimentFile(
        name=f"bench-{tier.name}",
        seeds=tuple(seeds),
        hosts=tier.hosts,
        run=tier.run,
        axes={ARM: {trial.arm: {"selector": selector}}, WORKLOAD: {trial.workload: run}},
        disclosure=tier.disclosure,
    )
    return cells_of(plan, hosts=tier.hosts, source=Path(f"tier {tier.name}"))


def training_choices(tier: Tier) -> list[dict[str, Any]]:
    """Return the training settings that are tried with the baseline, the tier's own first."""
    grid = {f"training.{key}": values for key, values in tier.tuning.training.items()}
    return _drawn(grid, {}, tier.tuning.settings, f"{tier.name}/training")


def option_choices(tier: Tier, name: str) -> list[dict[str, Any]]:
    """Return the settings of a selector's options that are tried, the arm's own first.

    Raises PluginError if the selector is not installed or refuses its options, or a value of its
    grid.
    """
    arm = tier.arm(name)
    selector = plugins.create(Selector, arm.selector or name, dict(arm.options))
    for key, values in arm.grid.items():
        for value in values:  # a value that is not drawn must be valid as well
            plugins.create(Selector, arm.selector or name, {**arm.options, key: value})
    grid = {f"selector.{key}": values for key, values in arm.grid.items()}
    own = {f"selector.{key}": getattr(selector, key, None) for key in arm.grid}
    return _drawn(grid, own, tier.tuning.settings, f"{tier.name}/{name}")


def _drawn(
    grid: Mapping[str, Sequence[Any]], own: Choice, count: int, purpose: str
) -> list[dict[str, Any]]:
    """Return no change, then settings drawn from a grid without repeats; `own` is not drawn."""
    others = [each for each in _points(grid) if each and each != own]
    return [{}, *random.Random(purpose).sample(others, min(count - 1, len(others)))]


def follows_tuning(
    tier: Tier, arm: str, grid: Mapping[str, Sequence[Any]], tried: Sequence[Choice]
) -> bool:
    """Return True if these are the settings that the tuning of an arm tries.

    grid: values by option. The selector may be missing here, so that its own options are unknown.
    They may be any point of the grid, or none.
    """
    if arm == tier.baseline:
        return list(tried) == training_choices(tier)
    keyed = {f"selector.{key}": values for key, values in grid.items()}
    purpose, most = f"{tier.name}/{arm}", tier.tuning.settings
    points = [each for each in _points(keyed) if each]
    possible = [{}, *(each for each in points if each not in tried)]
    return len(tried) <= most and any(
        list(tried) == _drawn(keyed, own, most, purpose) for own in possible
    )


def _points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def with_grid(tier: Tier, name: str, file: Path) -> Tier:
    """Return the tier with the grid of a file for an arm.

    Raises ConfigurationError if the file is not a grid or has invalid options or values,
    PluginError if the selector is not installed.
    """
    grid = read_grid(file)
    arm = tier.arm(name)
    plugins.create(Selector, arm.selector or name, dict(arm.options))
    arms = {**tier.arms, name: arm.model_copy(update={"grid": grid})}
    changed = tier.model_copy(update={"arms": arms})
    try:
        option_choices(changed, name)
    except PluginError as error:
        raise ConfigurationError(f"{file}: {error}", path=file) from error
    return changed


def read_grid(path: Path) -> dict[str, list[Any]]:
    """Return a grid file: lists of values by option. Raises ConfigurationError."""
    try:
        values = parse_toml(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigurationError(f"can't read {path}: {why}", path=path) from None
    for key, of in values.items():
        if not isinstance(of, list) or not of:
            raise ConfigurationError(
                f"{path}: {key} is not a list of values; write {key} = [0.1, 0.2]", path=path
            )
    return values


# Estimates ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Number of cells, and processor seconds for them with the baseline's costs."""

    cells: int
    seconds: float


def estimate(tier: Tier, arms: Sequence[str], *, baseline: bool) -> Estimate:
    """Return the estimate for some arms. baseline: True if the baseline must run as well."""
    counts: dict[str, int] = dict.fromkeys(tier.workloads, 0)
    for arm in dict.fromkeys([tier.baseline, *arms] if baseline else arms):
        tried = len(training_choices(tier) if arm == tier.baseline else option_choices(tier, arm))
        for name in tier.workloads:
            counts[name] += len(tier.seeds)
            if name in tier.ranked and tried > 1:
                counts[name] += tried * len(tier.tuning.seeds)
    seconds = 0.0
    for name, count in counts.items():
        workload = tier.workloads[name]
        seconds += count * (workload.start_seconds + tier.rounds(name) * workload.round_seconds)
    return Estimate(cells=sum(counts.values()), seconds=seconds)
