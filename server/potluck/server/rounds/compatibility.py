"""Checks before a run starts that its parts are compatible. A refusal names the two and the reason.

A selector, a strategy's server step and an objective don't depend on one another, so any of them
work together. The exceptions are the few pairs below, and the settings of clients that a strategy
itself refuses (`Strategy.review`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.common.disclosure import CLAIM
from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.learning.step_by_step import LEAKS, UNSAFE_STEPWISE
from potluck.common.run_file.run_settings import PluginTable
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Task
from potluck.server.selection import Selector
from potluck.server.strategy import Strategy


def check_composition(
    run_file: RunFile, strategy: Strategy, training: LocalTraining, *, source: str
) -> Sequence[str]:
    """Return remarks on combinations that work differently than expected, a sentence each.

    Raises ConfigurationError if two parts are not compatible, PluginError if one is missing.
    """
    correction = strategy.correction
    if strategy.one_way and strategy.auxiliary:
        raise PluginError(
            f"{source}: strategy {run_file.strategy.name} has both auxiliaries, which have all "
            "tensors of the model, and tensors that go one way; give it one of the two",
            strategy=run_file.strategy.name,
        )
    if training.kept_epochs and not _keeps(run_file):
        raise ConfigurationError(
            f"{source}: training.kept_epochs is {training.kept_epochs}, and clients keep nothing; "
            "name what they keep as `keep` of [model], or leave it out",
            kept_epochs=training.kept_epochs,
        )
    if correction is not None:
        check_installed(plugins.CORRECTIONS, correction.name)
        if correction.descends:
            _check_plain(run_file, source=source)
    for table in run_file.objective:
        check_objective(table, source=source)
    try:
        remarks = strategy.review(training, run_file.weighting)
        return (*remarks, *_leaks(run_file), *_on_keeping(run_file))
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error.message}", **error.metadata) from None


def _check_plain(run_file: RunFile, *, source: str) -> None:
    """Raise ConfigurationError if the run names an objective that its training would not use."""
    for table in run_file.objective:
        if table.name != "cross-entropy":
            raise ConfigurationError(
                f"{source}: strategy {run_file.strategy.name} and objective {table.name} don't go "
                f"together: {run_file.strategy.name} descends on a loss of its own; remove "
                "[objective]",
                strategy=run_file.strategy.name,
                objective=table.name,
            )


def check_private_training(training: LocalTraining, task: Task, *, source: str) -> None:
    """Raise ConfigurationError if noise can't hide single records with these training settings.

    Hosts check the model and the objective more closely, with the library that trains."""
    if training.unfit_for_noise:
        raise ConfigurationError(f"{source}: {training.unfit_for_noise}")
    from torch.nn.modules.batchnorm import _BatchNorm

    network: Any = task.model()
    found = next((n for n, each in network.named_modules() if isinstance(each, _BatchNorm)), "")
    if found:
        raise ConfigurationError(
            f"{source}: the model has batch normalisation ('{found[:80]}'), which mixes the "
            "records of a batch, so that [privacy] can't hide one of them; choose a model with "
            "group normalisation (resnet18-gn), or remove [privacy]",
            module=found[:80],
        )


def _leaks(run_file: RunFile) -> Sequence[str]:
    """List what the run's disclosure settings reveal, if that is more than they suggest."""
    masks = (f"secure_aggregation: {CLAIM}",) if run_file.secure_aggregation else ()
    if run_file.profiles.disclosure != UNSAFE_STEPWISE:
        return masks
    return (*masks, *(f'profiles.disclosure = "{UNSAFE_STEPWISE}": {leak}' for leak in LEAKS))


def _keeps(run_file: RunFile) -> bool:
    return run_file.model is not None and bool(run_file.model.keep)


def _on_keeping(run_file: RunFile) -> Sequence[str]:
    """Return a remark that clients measure the model, if they keep some of its tensors."""
    if not run_file.evaluation.every or not _keeps(run_file):
        return ()
    text = "clients measure the model, with what they keep; the coordinator's data are not used"
    return (f"[model] keep: {text}",)


def by_protocol(selector: Selector, run_file: RunFile, *, source: str) -> Selector:
    """Return the selector that does the same from sums and questions.

    Raises ConfigurationError if there is none, or if its first sum is over too few clients.
    """
    found = selector.by_protocol()
    if found is None:
        raise ConfigurationError(
            f"{source}: selector {run_file.selector.name} has no procedure of sums and questions "
            f'at every step, which profiles.disclosure = "{UNSAFE_STEPWISE}" asks for; choose '
            "dc-real or dc-balanced, or another disclosure",
            selector=run_file.selector.name,
        )
    if run_file.selector_limits.at_most_per:
        raise ConfigurationError(
            f"{source}: selector_limits.at_most_per does not work with profiles.disclosure = "
            f'"{UNSAFE_STEPWISE}": a cohort beyond the limit is chosen again, and its sums can\'t '
            "be asked for again; choose another disclosure, or remove the limit"
        )
    first = run_file.clients_per_round - found.added
    least = run_file.profiles.sum_hosts
    if first < least:
        raise ConfigurationError(
            f"{source}: {first} of {run_file.clients_per_round} clients are drawn at random, and "
            f"secure sums are over {least} hosts (profiles.sum_hosts) or more; raise "
            "`clients_per_round` or lower selector.added",
            clients_per_round=run_file.clients_per_round,
            first=first,
        )
    return found


def check_objective(table: PluginTable, *, source: str) -> None:
    """Raise ConfigurationError if the objective is unknown or refuses its options.

    Hosts create it. The coordinator only tries to, if the client's software is installed too.
    """
    check_installed(plugins.OBJECTIVES, table.name)
    try:
        plugins.check(plugins.OBJECTIVES, table.name, table.options)
    except ConfigurationError as error:
        if not isinstance(error.__cause__, ImportError):  # hosts have it, this machine need not
            raise type(error)(f"{source}: {error.message}", **error.metadata) from None


def check_installed(group: str, name: str) -> None:
    """Raise PluginError, listing what is installed, unless `name` is."""
    if name not in plugins.installed(group):
        raise plugins.not_installed(group, name)
