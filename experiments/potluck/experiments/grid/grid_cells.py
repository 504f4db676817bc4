"""The cells of an experiment: each is a run with a name derived from its settings."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tomlkit

from potluck.common.disclosure import SumKind
from potluck.common.errors import ConfigurationError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.learning.virtual_clock import VirtualClock
from potluck.common.net.build_version import RELEASE
from potluck.common.run_file.runfile import OLD_KEYS, RunFile, parse_run_file
from potluck.common.settings import plugins
from potluck.common.task import Task
from potluck.experiments.grid.definition import SEED, ExperimentFile, get, put
from potluck.server.plan.plan import draw_up

LONGEST_WAIT_SECONDS = 86_400.0
"""Default, in seconds, of limits on waiting for clients that the experiment does not set.

It is long, since a busy or sleeping machine must not change results. If a host's process ends, that
is noticed at once.
"""

_WAITS = (
    "round.deadline_seconds",
    "round.question_deadline_seconds",
    "round.grace_seconds",
    "profiles.deadline_seconds",
    "start_timeout_seconds",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run of the grid.

    labels: name of the cell's value by axis, including the seed. rounds: number of rounds to
    commit. digest: SHA-256 of all settings that affect the result, by which a finished cell is
    found.
    """

    labels: Mapping[str, str]
    seed: int
    run_file: str
    rounds: int
    clients: int
    hosts: int
    disclosure: Mapping[str, Any]
    digest: str

    @cached_property
    def run(self) -> RunFile:
        """The run file, parsed."""
        return parse_run_file(self.run_file, source=self.title)

    @property
    def clock(self) -> VirtualClock:
        """The clock that times the run's trainings."""
        return self.run.virtual_clock

    @property
    def simulated(self) -> bool:
        """True if a virtual clock times the trainings."""
        return self.clock.enabled

    @property
    def availability(self) -> dict[str, float]:
        """Availability by client, as client owners declare it: 1 minus the drop-out chance.

        It lacks clients that never drop out. Selectors can read it.
        """
        clock = self.clock
        clients = [f"client-{number}" for number in range(self.clients)]
        chances = {client: clock.drop_out_chance(client) for client in clients}
        return {client: 1.0 - chance for client, chance in chances.items() if chance}

    @property
    def task_text(self) -> str:
        """The task's table as text; the text is equal if the name and options are."""
        table = self.run.task
        return json.dumps({"name": table.name, "options": table.options}, sort_keys=True)

    def task(self) -> Task:
        """Task of the run. Raises PluginError."""
        table = json.loads(self.task_text)
        return plugins.create(Task, table["name"], table["options"])

    @property
    def title(self) -> str:
        """All of the cell's labels in one line."""
        return " · ".join(
            f"seed {value}" if axis == SEED else value for axis, value in self.labels.items()
        )


def cells_of(experiment: ExperimentFile, *, hosts: int, source: Path) -> list[Cell]:
    """Return all cells, ordered by seed, so that early results cover all settings.

    Raises ConfigurationError or PluginError if a coordinator would refuse a cell's run.
    """
    points = list(experiment.points())
    return [
        _cell(
            experiment, labels, table, seed, hosts, f"{source}: {labels}" if labels else str(source)
        )
        for seed in experiment.seeds
        for labels, table in points
    ]


def _cell(
    experiment: ExperimentFile,
    labels: Mapping[str, str],
    table: Mapping[str, Any],
    seed: int,
    hosts: int,
    source: str,
) -> Cell:
    complete: dict[str, Any] = json.loads(json.dumps(table))
    complete["seed"] = seed
    complete.setdefault("name", experiment.name)
    for key in _WAITS:
        if get(complete, key) is None:
            put(complete, key, LONGEST_WAIT_SECONDS)
    if get(complete, "task.name") is None:
        raise ConfigurationError(f"{source}: run.task.name is missing; name the task to learn")
    options = {key: value for key, value in complete["task"].items() if key != "name"}
    name = complete["task"]["name"]
    if get(complete, "task.seed") is None and "seed" in plugins.options_of(plugins.TASKS, name):
        put(complete, "task.seed", seed)
        options["seed"] = seed
    clients = plugins.create(Task, name, options).clients
    if not clients:
        raise ConfigurationError(
            f"{source}: task {name} does not declare its number of clients; add the attribute "
            "`clients` to the task"
        )
    complete["expected_clients"] = clients
    run_file = tomlkit.dumps(complete)
    parsed = parse_run_file(run_file, source=source)
    draw_up(run_file, source=source)  # the same check as the coordinator's
    for objective in parsed.objective:
        plugins.check(plugins.OBJECTIVES, objective.name, objective.options)
    disclosure = {**experiment.disclosure, "simulation_seed": seed}
    identity: dict[str, Any] = {
        "run": _with_digested_names(parsed),
        "clients": clients,
        "hosts": min(hosts, clients),
        "disclosure": disclosure,
        "software": RELEASE,
    }
    if others := sorted(_other_plugins(parsed)):
        identity["plugins"] = [code_of(group, name) for group, name in others]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return Cell(
        labels={**labels, SEED: str(seed)},
        seed=seed,
        run_file=run_file,
        rounds=parsed.rounds,
        clients=clients,
        hosts=min(hosts, clients),
        disclosure=disclosure,
        digest=hashlib.sha256(text.encode()).hexdigest()[:32],
    )


def _other_plugins(run: RunFile) -> Iterator[tuple[str, str]]:
    """Yield group and name of each plug-in of a run that another package offers."""
    named = [
        (plugins.TASKS, run.task.name),
        (plugins.SELECTORS, run.selector.name),
        (plugins.STRATEGIES, run.strategy.name),
        *((plugins.OBJECTIVES, each.name) for each in run.objective),
    ]
    yield from ((group, name) for group, name in named if other_package(group, name) is not None)


def other_package(group: str, name: str) -> str | None:
    """Return the package that a plug-in comes from; None if it comes with Potluck."""
    found = plugins.package_of(group, name)
    return None if found is None or found.split()[0] == "potluck" else found


@cache
def code_of(group: str, name: str) -> list[str]:
    """Return a plug-in's group, name and package, and the SHA-256 of its code.

    Its code is that of the module that defines it, and of the modules in the same folder if that is
    a package. A cell with other code is another cell, so an edited selector runs again.
    """
    module = sys.modules[plugins.find_callable(group, name).__module__]
    source = Path(module.__file__ or "")
    files = sorted(source.parent.rglob("*.py")) if module.__package__ else [source]
    digest = hashlib.sha256()
    for each in files:
        digest.update(f"{each.relative_to(source.parent)}\0".encode() + each.read_bytes())
    return [group, name, plugins.package_of(group, name) or "", digest.hexdigest()]


def _with_digested_names(run: RunFile) -> dict[str, Any]:
    """Return a run file's values in the form that digests are computed from.

    This form is the same for every release, so that finished cells are found again: keys have their
    first names, and settings added later are omitted if unset.
    """
    values = run.model_dump(mode="json", exclude={"name"})
    for first, current in OLD_KEYS.items():
        values[first] = values.pop(current)
    if run.privacy is None:
        del values["privacy"]
    if not run.selection.verifiable:
        del values["selection"]
    if run.round.late_updates.exponential_divisor == 1:
        del values["round"]["late_updates"]["exponential_divisor"]
    if run.profiles.triplet.pivot == "absolute":
        del values["profiles"]["triplet"]["pivot"]
    if run.virtual_clock.trace is None:
        clock = values["virtual_clock"]
        del clock["trace"], clock["trace_sha256"]
    if run.profiles.disclosure == UNSAFE_STEPWISE:
        values["profiles"]["disclosure"] = SumKind.STEPWISE.value
    return values
