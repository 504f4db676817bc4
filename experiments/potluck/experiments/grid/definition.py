"""The experiment file: a base run, the axes along which it varies, and the reading of results."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from potluck.common.errors import ConfigurationError
from potluck.common.run_file.runfile import OLD_KEYS
from potluck.common.settings.configuration import Settings, decode, parse_toml, validate
from potluck.common.settings.configuration_errors import EXPERIMENT
from potluck.common.settings.old_spelling import current_keys
from potluck.experiments.presets import Assumption, Preset, preset_named

# Lists of seeds -----------------------------------------------------------------------------------

MOST_SEEDS = 10_000
"""Maximum number of seeds; a longer list is refused as a typing error, such as a date."""

_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def seeds_in(text: str) -> tuple[int, ...]:
    """Return the seeds of a text such as `0-9` or `0,3,5-7`, in order; ranges include both ends.

    Raises ConfigurationError for any other text, a repeated seed, a descending range, or more than
    MOST_SEEDS seeds.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _refused("must be numbers and ranges, such as 0-9 or 0,3,5-7", text)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _refused(f"has the descending range {first}-{last}", text)
        if last - first + len(found) >= MOST_SEEDS:
            raise _refused(f"must have at most {MOST_SEEDS} seeds", text)
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise _refused("has a seed twice", text)
    return tuple(found)


def _refused(why: str, text: str) -> ConfigurationError:
    return ConfigurationError(f"--seeds {why}; got '{text}'", seeds=text)


# The experiment file ------------------------------------------------------------------------------

Metric = Literal["accuracy", "worst_group_accuracy", "weighted_f1", "loss"]
Measure = Literal["accuracy", "worst_group_accuracy", "weighted_f1", "loss", "worst_tenth"]
SEED = "seed"
"""Name of the axis that every experiment has: cells that differ only in the seed are repetitions.
"""


class PublishedFigure(Settings):
    """A published result, shown next to the experiment's own."""

    where: dict[str, str] = Field(
        description="Cells with which the value is compared: for each axis, the label of the\n"
        "cells."
    )
    value: float = Field(
        description="The published value, in the metric's unit (shares in [0, 1])."
    )
    deviation: float | None = Field(
        default=None, description="Standard deviation of the published value, if known."
    )
    source: str = Field(default="", description="Publication that reports the value.")


class Reading(Settings):
    """How a cell's rounds are reduced to one number, and cells to tables."""

    metric: Metric = Field(default="accuracy", description="Metric that the tables compare.")
    last: int = Field(
        default=1,
        ge=1,
        description="Number of evaluations at the end of a run over which the metric is averaged.",
    )
    columns: str | None = Field(
        default=None, description="Axis whose labels are the table's columns. Unset: one column."
    )
    baseline: dict[str, str] = Field(
        default_factory=dict,
        description="Baseline with which the other arms are compared, in tests paired by seed;\n"
        "given as axis = label.",
    )
    compared: str | None = Field(
        default=None,
        description="Axis whose arms are compared in detail: at equal rounds, bytes and\n"
        "simulated seconds, by the clients that they select, and by mean ranks over the other\n"
        "axes. Unset: no such comparison.",
    )
    also: tuple[Measure, ...] = Field(
        default=(),
        description="Further metrics of the compared arms; worst_tenth is the mean accuracy of\n"
        "the worst tenth of the clients, and needs evaluation.spread.",
    )
    targets: tuple[float, ...] = Field(
        default=(),
        description="Values of the metric; the report shows the costs until each arm first\n"
        "reaches them.",
    )
    published: tuple[PublishedFigure, ...] = Field(
        default=(), description="Published results to show next to the experiment's own."
    )


class ExperimentFile(Settings):
    """An experiment file: a base run, and the axes of the grid along which its settings vary."""

    kind = EXPERIMENT

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="Name of the experiment, and of its folder.",
    )
    title: str = Field(default="", description="Title of the report, one line.")
    text: str = Field(default="", description="Description of the experiment, in Markdown.")
    preset: str | None = Field(
        default=None,
        description="Name of a preset: a paper's settings, on which `run` is\n"
        "based; see `potluck preset`.",
    )
    seeds: tuple[int, ...] = Field(
        default=(0, 1, 2),
        min_length=1,
        description="Seeds of the run and the task; each cell of the grid is repeated with each\n"
        "seed.",
    )
    hosts: int = Field(
        default=2, ge=1, description="Number of client processes of each federation."
    )
    run: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings that all cells share, as in a run file; they override the preset.",
    )
    axes: dict[str, list[Any] | dict[str, dict[str, Any]]] = Field(
        default_factory=dict,
        description="Axes of the grid. If the value is a list, the axis is a dotted key of the\n"
        "run file, such as task.alpha, and the list has its values. If the value is a table, its\n"
        "keys are labels, each with a table of run-file keys to set.",
    )
    disclosure: dict[str, Any] = Field(
        default_factory=dict,
        description="The [disclosure] table of all hosts. Noise is derived from the seed, so\n"
        "that an experiment can be repeated.",
    )
    reading: Reading = Field(default=Reading(), description="How the report evaluates the results.")

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError("must be distinct whole numbers from 0")
        return seeds

    @field_validator("axes")
    @classmethod
    def _filled(cls, axes: dict[str, Any]) -> dict[str, Any]:
        for name, values in axes.items():
            if name == SEED:
                raise ValueError("seeds are given as seeds = [0, 1, 2], not as an axis")
            if not values:
                raise ValueError(f"axis '{name}' has no values")
            if len({label(value) for value in values}) < len(values):
                raise ValueError(f"axis '{name}' has a value twice")
        return axes

    @model_validator(mode="after")
    def _known_labels(self) -> ExperimentFile:
        axes = {name: {label(value) for value in values} for name, values in self.axes.items()}
        mentions = [("reading.baseline", self.reading.baseline)]
        mentions += [("reading.published", each.where) for each in self.reading.published]
        if self.reading.columns is not None and self.reading.columns not in axes:
            raise ValueError(
                f"reading.columns: axis '{self.reading.columns}' does not exist; axes: "
                f"{', '.join(axes) or 'none'}"
            )
        if self.reading.compared is not None and self.reading.compared not in axes:
            raise ValueError(
                f"reading.compared: axis '{self.reading.compared}' does not exist; axes: "
                f"{', '.join(axes) or 'none'}"
            )
        for where, labels in mentions:
            for axis, value in labels.items():
                if axis not in axes:
                    raise ValueError(
                        f"{where}: axis '{axis}' does not exist; axes: {', '.join(axes)}"
                    )
                if where == "reading.baseline" and value not in axes[axis]:
                    raise ValueError(
                        f"{where}: axis '{axis}' has no value '{value}'; values: "
                        f"{', '.join(sorted(axes[axis]))}"
                    )
        return self

    def points(self) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
        """Yield every point of the grid, without seeds: labels by axis, and the run's table."""
        choices = [_choices(name, values) for name, values in self.axes.items()]
        for combination in itertools.product(*choices):
            labels = {name: each for name, (each, _) in zip(self.axes, combination, strict=True)}
            table = copy.deepcopy(self._base())
            for _, settings in combination:
                for key, value in settings.items():
                    put(table, key, value)
            yield labels, table

    def _base(self) -> dict[str, Any]:
        preset = self.paper
        return merged({} if preset is None else preset.run, self.run)

    @property
    def paper(self) -> Preset | None:
        """The preset that the file names, if any."""
        return None if self.preset is None else preset_named(self.preset)

    def assumptions(self) -> list[Assumption]:
        """Return the preset's values that are not from the paper and that this file keeps."""
        if self.paper is None:
            return []
        base = self._base()
        varied = {*self.axes}.union(*(_always_set(values) for values in self.axes.values()))
        return [
            each
            for each in self.paper.assumptions
            if each.key not in varied and get(base, each.key) == get(self.paper.run, each.key)
        ]


def load_experiment(
    path: Path, *, quick: bool, seeds: tuple[int, ...] | None = None
) -> ExperimentFile:
    """Load an experiment file.

    quick: True to apply its [quick] table. seeds: seeds to use instead of the file's.

    Raises ConfigurationError.
    """
    try:
        values = parse_toml(decode(path.read_bytes(), source=str(path)), source=str(path))
    except OSError as error:
        raise ConfigurationError(f"can't read {path}: {error.strerror}", path=path) from None
    values = _with_current_names(values, source=str(path))
    shortened = values.pop("quick", None)
    if quick:
        if not isinstance(shortened, dict):
            raise ConfigurationError(
                f"{path} has no [quick] table; omit --quick, or add the table with the values for "
                "a quick run",
                path=path,
            )
        current = _with_current_names(shortened, source=f"{path}: [quick]")
        values = merged(values, current, replaced=("axes", "seeds"))
    if seeds is not None:
        values["seeds"] = seeds
    return validate(ExperimentFile, values, source=str(path))


def _with_current_names(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return an experiment file's values with old names of a run file's keys replaced, in the base
    run, in axes, and where the reading names an axis."""

    def renamed(table: Any, names: Mapping[str, str] = OLD_KEYS) -> Any:
        if not isinstance(table, dict):
            return table
        return current_keys(table, names, source=source)

    found = dict(values)
    axes = found.get("axes")
    if "run" in found:
        found["run"] = renamed(found["run"])
    if not isinstance(axes, dict):
        return found
    varied = {old: new for old, new in OLD_KEYS.items() if isinstance(axes.get(old), list)}
    found["axes"] = {
        name: {key: renamed(each) for key, each in arms.items()} if isinstance(arms, dict) else arms
        for name, arms in renamed(axes, varied).items()
    }
    reading = found.get("reading")
    if varied and isinstance(reading, dict):
        found["reading"] = _renamed_axes(reading, varied)
    return found


def _renamed_axes(reading: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a table [reading] with axes renamed. names: new names by old name."""
    found = dict(reading)
    for key in ("columns", "compared"):
        if isinstance(found.get(key), str):
            found[key] = names.get(found[key], found[key])
    if isinstance(found.get("baseline"), dict):
        found["baseline"] = {names.get(k, k): v for k, v in found["baseline"].items()}
    return found


def label(value: Any) -> str:
    """Return an axis value as text, for tables."""
    return (
        value
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value}"
    )


def merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], *, replaced: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return two nested tables merged into one; values of `changes` take precedence.

    In tables named in `replaced`, each key is replaced as a whole. If a plug-in's name changes, the
    options of the old plug-in are dropped.
    """
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            other_plugin = "name" in value and value["name"] != old.get("name", value["name"])
            if key in replaced:
                result[key] = {**old, **copy.deepcopy(dict(value))}
            elif other_plugin:
                result[key] = copy.deepcopy(dict(value))
            else:
                result[key] = merged(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A plug-in's new name drops the options of the old one."""
    *path, last = key.split(".")
    for part in path:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"'{key}': '{part}' is a value, not a table")
        table = inner
    if last == "name" and path and table.get("name", value) != value:
        table.clear()
    table[last] = value


def get(table: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; None if it is not set."""
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _choices(
    axis: str, values: list[Any] | dict[str, dict[str, Any]]
) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(values, dict):
        return [(name, _flat(settings)) for name, settings in values.items()]
    return [(label(value), {axis: value}) for value in values]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys.

    Keys `name` come first: setting a plug-in's name drops options set before.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return dict(sorted(flat.items(), key=lambda item: not item[0].endswith(".name")))


def _always_set(values: list[Any] | dict[str, dict[str, Any]]) -> set[str]:
    """Return the keys that every value of an axis sets, in place of the base run's values."""
    if not isinstance(values, dict):
        return set()
    return set.intersection(*(set(_flat(settings)) for settings in values.values()))
