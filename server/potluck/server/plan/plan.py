"""Creates the objects that a run file names, such as selector and strategy; checks them before the
run starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from potluck.common.errors import ConfigurationError
from potluck.common.learning.measures import MeasuredModel, own_trainer
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.learning.task_loading import make_task
from potluck.common.learning.training import training_for
from potluck.common.learning.triplet import triplet_settings_for
from potluck.common.learning.virtual_clock import pace
from potluck.common.run_file.runfile import RunFile, parse_run_file
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.signal import signal_named
from potluck.common.task import Task
from potluck.common.trainer import Measure, Trainer
from potluck.common.updates.kept_states import CORRECTION, MODEL, PERSONAL
from potluck.server.machine.round_rules import RoundRules
from potluck.server.plan.compatibility import (
    by_protocol,
    check_answer_noise,
    check_composition,
    check_private_clients,
    check_private_training,
)
from potluck.server.plan.needs_and_hides import (
    AVAILABILITY,
    OF_MODELS,
    OF_STRATEGIES,
    RunParts,
    Trait,
    check_hidden,
)
from potluck.server.plan.path_rules import PathRules, path_of
from potluck.server.plan.stopping import StopRule, remarks_on_best, stop_rule
from potluck.server.selection import BeforeUpload, Selector
from potluck.server.strategy import Strategy

_SELECTION_RULES: Final = "selection-rules"
"""Entry-point name of the function that checks a run file, in the group `potluck.integrations`."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run file with the objects that it names: task, selector, strategy, trainer, update path.

    Triplet settings that the run file omits are those of the task.
    """

    run_file: RunFile
    task: Task
    selector: Selector
    strategy: Strategy
    training: LocalTraining
    path: type[PathRules]
    """Class of the update path: open, noised, summed or masked."""
    trainer: Trainer | None = None
    """The task's own trainer; None for a classification task."""
    stop_rule: StopRule | None = None
    """Rule for the run's best model and its early end; None if the run has no such rule."""
    remarks: Sequence[str] = ()
    """Remarks for the operator who starts the run."""

    @property
    def rules(self) -> RoundRules:
        """Return the settings that the state machine uses."""
        return RoundRules(
            rounds=self.run_file.rounds,
            clients_per_round=self.run_file.clients_per_round,
            expected_clients=self.run_file.expected_clients,
            start_timeout_seconds=self.run_file.start_timeout_seconds,
            policy=self.path.policy(self.run_file),
            hosts=self.path.fewest_hosts(self.run_file),
            evaluate_every=self.run_file.evaluation.every,
            simulated=self.run_file.virtual_clock.enabled,
            simulated_deadline=self.run_file.virtual_clock.deadline_seconds or math.inf,
            offers=self.before_upload is not None,
        )

    @property
    def plugins(self) -> Mapping[str, object]:
        """Return the plug-ins that the coordinator calls, by their names in error messages."""
        return {
            f"selector '{self.run_file.selector.name}'": self.selector,
            f"strategy '{self.run_file.strategy.name}'": self.strategy,
        }

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Metrics that the task's own trainer declares; empty for a classification task."""
        return {} if self.trainer is None else self.trainer.measures

    @property
    def reports(self) -> frozenset[str]:
        """Names of the numbers that clients report with updates, for the selector."""
        return frozenset(self.selector.reports)

    @property
    def before_upload(self) -> BeforeUpload | None:
        """Question that clients answer after training, before they send their updates."""
        return self.selector.before_upload(self.task.classes)

    @property
    def kept(self) -> Sequence[str]:
        """Purposes for which clients keep a state until their next training; see `kept_states`."""
        correction, table = self.strategy.correction, self.run_file.model
        kept = [CORRECTION] if correction is not None and correction.keeps else []
        if table is not None and table.keep:
            kept.append(MODEL)
        return [*kept, PERSONAL] if self.run_file.personal.method == "ditto" else kept

    @property
    def client_models(self) -> Sequence[MeasuredModel]:
        """The models that clients evaluate even if the coordinator has evaluation data."""
        settings = self.run_file.evaluation
        wanted = {
            MeasuredModel.ROUND: settings.spread,
            MeasuredModel.TUNED: settings.fine_tune_epochs > 0,
            MeasuredModel.PERSONAL: self.run_file.personal.method == "ditto",
        }
        return [model for model, measured in wanted.items() if measured]

    @property
    def asks_about_data(self) -> bool:
        """True if the selector asks clients questions about their data."""
        return bool(set(self.selector.asks_questions) - {AVAILABILITY})

    @property
    def wants_label_totals(self) -> bool:
        """True if the selector needs the federation's label counts from a secure sum."""
        disclosure = self.run_file.profiles.disclosure
        return self.selector.wants_label_totals and disclosure in ("noisy", UNSAFE_STEPWISE)

    def with_base(self, blake3: str) -> RunPlan:
        """Return this plan, with the digest of the part of the model that hosts don't receive.

        The plan is unchanged if hosts receive the whole model.
        """
        table = self.run_file.model
        if table is None or not blake3:
            return self
        named = table.model_copy(update={"base_blake3": blake3})
        return replace(self, run_file=self.run_file.model_copy(update={"model": named}))

    def client_pace(
        self, round_number: int, client: str, *, speed: float = 1.0, passes: float = 1.0
    ) -> float:
        """Simulated seconds per sample of a client in a round; 0 on a real clock. speed, passes: as
        in `pace`."""
        run_file = self.run_file
        if not run_file.virtual_clock.enabled:
            return 0.0
        return pace(
            run_file.virtual_clock,
            seed=run_file.seed,
            client=client,
            round_number=round_number,
            speed=speed,
            passes=passes,
        )


def draw_up(
    text: str, *, source: str, model_modules: Sequence[str] = plugins.MODEL_MODULES
) -> RunPlan:
    """Return the plan of a run file. model_modules: modules that may define a named model.

    Raises ConfigurationError or PluginError, naming the key, the value and what is installed.
    """
    run_file = parse_run_file(text, source=source)
    if run_file.expected_clients and run_file.clients_per_round > run_file.expected_clients:
        raise ConfigurationError(
            f"{source}: 'clients_per_round' is {run_file.clients_per_round}, but "
            f"'expected_clients' is only {run_file.expected_clients}; lower `clients_per_round` "
            "or raise `expected_clients`",
            clients_per_round=run_file.clients_per_round,
            expected_clients=run_file.expected_clients,
        )
    task = make_task(
        run_file.task.name,
        run_file.task.options,
        model=None if run_file.model is None else run_file.model.maker,
        model_modules=model_modules,
    )
    trainer = own_trainer(task, run_file.task.name)
    _check_parts(run_file, task, source)
    selector = run_file.selector
    choosing = plugins.create(Selector, selector.name, selector.options)
    _check_selector(run_file, choosing, source)
    _check_verifiable(run_file, source=source)
    if run_file.profiles.disclosure == UNSAFE_STEPWISE:
        choosing = by_protocol(choosing, run_file, source=source)
    strategy = plugins.create(Strategy, run_file.strategy.name, run_file.strategy.options)
    for signal in sorted(choosing.needs_profiles | strategy.needs_profiles):
        signal_named(signal)  # raises if not installed
    recommended = dict(choosing.training)
    if run_file.privacy is not None:  # noisy answers need no held-out samples: clients train on all
        recommended.pop("validation_share", None)
    chosen = {**recommended, **strategy.training, **run_file.training}
    training = training_for(task, chosen, source=f"{source}: [training]")
    parts = RunParts(
        run_file=run_file,
        selector=choosing,
        strategy=strategy,
        training=training,
        trainer=trainer,
    )
    check_hidden(parts, *OF_MODELS, source=source)
    _check_places(run_file, strategy, source)
    check_hidden(parts, Trait.OWN_TRAINER, *OF_STRATEGIES, source=source)
    remarks = check_composition(run_file, strategy, training, source=source)
    private = (Trait.PRIVATE_RECORDS, Trait.PRIVATE_CLIENTS, Trait.NOISED_SUMS)
    check_hidden(parts, *private, Trait.MASKS, source=source)
    if Trait.PRIVATE_CLIENTS in parts.traits and Trait.NOISED_SUMS not in parts.traits:
        check_private_clients(run_file, task, source=source)
    elif Trait.PRIVATE_RECORDS in parts.traits:
        check_private_training(training, task, source=source)
        check_answer_noise(run_file, choosing, source=source)
    path = _path(run_file, source)
    check_hidden(parts, Trait.HOST_SUMS, Trait.LATE_UPDATES, source=source)
    return RunPlan(
        run_file=_with_recommendations(run_file, task, source),
        task=task,
        selector=choosing,
        strategy=strategy,
        training=training,
        path=path,
        trainer=trainer,
        stop_rule=stop_rule(run_file, task, trainer, strategy, source=source),
        remarks=(*remarks, *remarks_on_best(run_file)),
    )


def _path(run_file: RunFile, source: str) -> type[PathRules]:
    """Return the class of the run's update path. Raises ConfigurationError, also if the path does
    not allow the run's sizes."""
    try:
        path = path_of(run_file)
        path.check_sizes(run_file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error.message}", **error.metadata) from None
    return path


def _check_verifiable(run_file: RunFile, *, source: str) -> None:
    """Raise ConfigurationError if the run's selections can't be verified as the run file
    requests."""
    if not run_file.selection.verifiable:
        return
    if not plugins.is_present(plugins.INTEGRATIONS, _SELECTION_RULES):
        raise ConfigurationError(
            f"{source}: selection.verifiable = true needs the package potluck.verifiable, which "
            "this coordinator does not have; install all packages of Potluck, or remove "
            "[selection]"
        )
    try:
        plugins.integration(_SELECTION_RULES)(run_file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error.message}", **error.metadata) from None


def _check_parts(run_file: RunFile, task: Task, source: str) -> None:
    """Raise ConfigurationError if the task has data for fewer clients than the run expects."""
    if task.clients and run_file.expected_clients > task.clients:
        raise ConfigurationError(
            f"{source}: 'expected_clients' is {run_file.expected_clients}, but task "
            f"'{run_file.task.name}' has data for {task.clients} clients; lower "
            "`expected_clients`, or raise `clients` of [task]",
            parts=task.clients,
            expected_clients=run_file.expected_clients,
        )


def _check_selector(run_file: RunFile, selector: Selector, source: str) -> None:
    """Raise ConfigurationError if more clients are expected than the selector's maximum."""
    most = selector.most_clients
    if most is not None and run_file.expected_clients > most:
        raise ConfigurationError(
            f"{source}: selector {run_file.selector.name} compares all clients with one another "
            f"and supports up to {most:,} clients, but 'expected_clients' is "
            f"{run_file.expected_clients:,}; choose another selector or option, or lower "
            "`expected_clients`",
            selector=run_file.selector.name,
            expected_clients=run_file.expected_clients,
        )


def _check_places(run_file: RunFile, strategy: Strategy, source: str) -> None:
    """Raise ConfigurationError if the run has more clients than the strategy's maximum."""
    expected, each_round = run_file.expected_clients, run_file.clients_per_round
    most, wanted = strategy.most_clients, max(expected, each_round)
    if most is not None and wanted > most:
        key = "expected_clients" if expected == wanted else "clients_per_round"
        raise ConfigurationError(
            f"{source}: strategy {run_file.strategy.name} supports up to {most} clients with these "
            f"options, but '{key}' is {wanted:,}; choose another strategy or other options, "
            f"or lower {key}",
            strategy=run_file.strategy.name,
            clients=wanted,
        )


def _with_recommendations(run_file: RunFile, task: Task, source: str) -> RunFile:
    profiles = run_file.profiles
    chosen = profiles.triplet.model_dump(exclude_unset=True)
    triplet = triplet_settings_for(task, chosen, source=f"{source}: [profiles.triplet]")
    return run_file.model_copy(
        update={"profiles": profiles.model_copy(update={"triplet": triplet})}
    )
