"""What goes together with a task that brings its own trainer; checked before a run starts."""

from __future__ import annotations

from potluck.common.errors import ConfigurationError
from potluck.common.learning.step_by_step import PROTOCOL
from potluck.common.run_file.runfile import RunFile
from potluck.common.trainer import Trainer
from potluck.server.selection import Selector, Signal
from potluck.server.strategy import Strategy, Summation


def check_trainable(
    run_file: RunFile, trainer: Trainer, selector: Selector, strategy: Strategy, *, source: str
) -> None:
    """Raise ConfigurationError where a run asks for what the task's trainer can't do, naming both
    and the remedy."""
    task, name = run_file.task.name, run_file.selector.name
    wanted = {*selector.needs, *selector.asks, *selector.reports}
    if strategy.parts or strategy.needs_profiles:
        raise ConfigurationError(
            f"{source}: strategy {run_file.strategy.name} has groups of clients train parts of a "
            f"network in the built-in loop, and task '{task}' trains by itself; choose another "
            "strategy (fedavg, fedadam)",
            strategy=run_file.strategy.name,
            task=task,
        )
    if selector.wants_label_totals or run_file.profiles.disclosure == PROTOCOL:
        wanted.add(Signal.LABEL_COUNTS)
    missing = sorted(str(each) for each in wanted - trainer.capabilities)
    if missing:
        raise ConfigurationError(
            f"{source}: selector {name} asks clients for {' and '.join(missing)}, which the "
            f"trainer of task '{task}' does not give; choose a selector that does not ask for it "
            "(uniform, round-robin), or add it to the trainer and its capabilities",
            selector=name,
            task=task,
        )
    if strategy.correction is not None or strategy.summation is Summation.NORMALIZED:
        why = "corrects" if strategy.correction is not None else "counts"
        raise ConfigurationError(
            f"{source}: strategy {run_file.strategy.name} {why} the single steps of the built-in "
            f"loop, and task '{task}' trains by itself; choose another strategy (fedavg, fedadam)",
            strategy=run_file.strategy.name,
            task=task,
        )
    if strategy.trains:
        raise ConfigurationError(
            f"{source}: strategy {run_file.strategy.name} trains a classifier on the coordinator, "
            f"and task '{task}' trains by itself; choose another strategy (fedavg, fedadam)",
            strategy=run_file.strategy.name,
            task=task,
        )
    if run_file.personal.method == "ditto":
        raise ConfigurationError(
            f'{source}: personal.method = "ditto" holds the steps of the built-in loop to the '
            f"round's model, and task '{task}' trains by itself; remove [personal], or set "
            "evaluation.fine_tune_epochs",
            task=task,
        )
    if "objective" in run_file.model_fields_set:
        raise ConfigurationError(
            f"{source}: objective {run_file.objective[0].name} is a loss for the built-in loop, "
            f"and task '{task}' has its own; remove [objective]",
            task=task,
        )
