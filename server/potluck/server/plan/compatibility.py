"""Checks before a run starts that its plug-ins and settings are compatible. Errors name both, and
the reason.

A selector, a strategy's server step and an objective don't depend on one another, so any of them
work together. The exceptions are the few pairs below, and the settings of clients that a strategy
itself refuses (`Strategy.review`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.common.disclosure import CLAIM
from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.learning.measures import TRAINING, MeasuredModel
from potluck.common.learning.step_by_step import LEAKS, UNSAFE_STEPWISE
from potluck.common.run_file.run_settings import PluginTable
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.task import Task
from potluck.common.tensors.layout import Layout
from potluck.common.tensors.model_arrays import buffer_names
from potluck.server.plan.needs_and_hides import AVAILABILITY
from potluck.server.plan.update_noise import noise_multiplier
from potluck.server.selection import Selector
from potluck.server.strategy import Strategy


def check_composition(
    run_file: RunFile, strategy: Strategy, training: LocalTraining, *, source: str
) -> Sequence[str]:
    """Return remarks on combinations with unexpected effects, one sentence each.

    Raises ConfigurationError if two plug-ins or settings are not compatible, PluginError if a
    plug-in is not installed.
    """
    correction = strategy.correction
    if strategy.one_way and strategy.auxiliary:
        raise PluginError(
            f"{source}: strategy {run_file.strategy.name} has both `auxiliaries`, which have all "
            "tensors of the model, and `one_way` tensors; remove one of these attributes",
            strategy=run_file.strategy.name,
        )
    if training.kept_epochs and not _keeps(run_file):
        raise ConfigurationError(
            f"{source}: training.kept_epochs is {training.kept_epochs}, but clients keep no "
            "tensors; list the tensors to keep in `keep` of [model], or remove "
            "training.kept_epochs",
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
                f"{source}: strategy {run_file.strategy.name} and objective {table.name} are not "
                f"compatible: {run_file.strategy.name} has a loss of its own; remove "
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
    if isinstance(network, dict):
        return
    found = next((n for n, each in network.named_modules() if isinstance(each, _BatchNorm)), "")
    if found:
        raise ConfigurationError(
            f"{source}: the model has batch normalisation ('{found[:80]}'), which mixes the "
            "records of a batch, so that [privacy] can't hide one of them; choose a model with "
            "group normalisation (resnet18-gn), or remove [privacy]",
            module=found[:80],
        )


def check_private_clients(run_file: RunFile, task: Task, *, source: str) -> None:
    """Raise ConfigurationError if noise can't hide the clients of a run.

    A model with running statistics is refused, because noise would make these statistics useless.
    """
    names = sorted(buffer_names(task.model()))
    if names:
        raise ConfigurationError(
            f"{source}: the model has running statistics ('{names[0][:80]}'), but noise that "
            "hides clients can only protect parameters; choose a model with group normalisation "
            "(resnet18-gn), or remove [privacy]",
            tensor=names[0][:80],
        )
    if run_file.privacy is not None:
        noise_multiplier(run_file.privacy, run_file.rounds)


def check_noised_model(network: Any, layout: Layout) -> None:
    """Raise ConfigurationError if the model needs running statistics of its clients' data.

    The coordinator adds noise to parameters and keeps all buffers as they are. layout: layout of
    the tensors that clients receive."""
    from torch.nn.modules.batchnorm import _NormBase

    for name, each in network.named_modules():
        if isinstance(each, _NormBase) and f"{name}.running_mean" in layout.by_name:
            raise ConfigurationError(
                f"the model has running statistics ('{name[:80]}'), which would stay at their "
                'first values with privacy.noise = "coordinator"; choose a model with group '
                "normalisation (resnet18-gn), or remove [privacy]",
                module=name[:80],
            )


def check_noised_evaluation(run_file: RunFile, *, on_clients: bool) -> None:
    """Raise ConfigurationError if a metric without noise decides which model is the best.

    on_clients: True if models are evaluated on the clients' held-out samples.
    """
    name = run_file.followed
    of_clients = (TRAINING, MeasuredModel.TUNED, MeasuredModel.PERSONAL)
    if name is None or not (on_clients or name.startswith(of_clients)):
        return
    key = "retention.keep_best" if run_file.stop is None else "stop.measure"
    raise ConfigurationError(
        f"{key} = '{name}' is not compatible with privacy.noise = \"coordinator\": clients "
        f"measure '{name}' without noise; evaluate on data of the coordinator, or remove {key}",
        measure=name,
    )


def check_answer_noise(run_file: RunFile, selector: Selector, *, source: str) -> None:
    """Raise ConfigurationError if the run's selector asks about data, and the run file sets no
    noise for the answers."""
    privacy, asked = run_file.privacy, sorted(set(selector.asks_questions) - {AVAILABILITY})
    if privacy is None or not asked or privacy.answer_noise_multiplier or privacy.epsilon:
        return
    raise ConfigurationError(
        f"{source}: selector {run_file.selector.name} asks clients for {' and '.join(asked)}, "
        "but [privacy] does not set the noise of the answers; set "
        "privacy.answer_noise_multiplier, such as 20, or set privacy.epsilon in place of "
        "privacy.noise_multiplier",
        selector=run_file.selector.name,
    )


def _leaks(run_file: RunFile) -> Sequence[str]:
    """Return remarks on disclosure settings that reveal more than their names suggest."""
    masks: tuple[str, ...] = ()
    if run_file.secure_aggregation and run_file.privacy is None:
        masks = (f"secure_aggregation: {CLAIM}",)
    if run_file.profiles.disclosure != UNSAFE_STEPWISE:
        return masks
    return (*masks, *(f'profiles.disclosure = "{UNSAFE_STEPWISE}": {leak}' for leak in LEAKS))


def _keeps(run_file: RunFile) -> bool:
    return run_file.model is not None and bool(run_file.model.keep)


def _on_keeping(run_file: RunFile) -> Sequence[str]:
    """If clients keep some of the model's tensors, return a remark that only clients evaluate the
    model."""
    if not run_file.evaluation.every or not _keeps(run_file):
        return ()
    text = "clients measure the model, with what they keep; the coordinator's data are not used"
    return (f"[model] keep: {text}",)


def by_protocol(selector: Selector, run_file: RunFile, *, source: str) -> Selector:
    """Return the variant of this selector that makes the same choice from secure sums and
    questions.

    Raises ConfigurationError if there is no such variant, or if its first sum is over too few
    clients.
    """
    found = selector.by_protocol()
    if found is None:
        raise ConfigurationError(
            f"{source}: selector {run_file.selector.name} has no step-by-step procedure, which "
            f'profiles.disclosure = "{UNSAFE_STEPWISE}" needs; choose dc-real or dc-balanced, or '
            "another disclosure",
            selector=run_file.selector.name,
        )
    if run_file.selector_limits.at_most_per:
        raise ConfigurationError(
            f"{source}: selector_limits.at_most_per does not work with profiles.disclosure = "
            f'"{UNSAFE_STEPWISE}": a cohort beyond the limit is chosen again, and its sums can\'t '
            "be computed twice; choose another disclosure, or remove the limit"
        )
    first = run_file.clients_per_round - found.added
    least = run_file.profiles.sum_hosts
    if first < least:
        raise ConfigurationError(
            f"{source}: {first} of {run_file.clients_per_round} clients are drawn at random, but "
            f"a secure sum needs at least {least} hosts (profiles.sum_hosts); raise "
            "`clients_per_round` or lower selector.added",
            clients_per_round=run_file.clients_per_round,
            first=first,
        )
    return found


def check_objective(table: PluginTable, *, source: str) -> None:
    """Raise ConfigurationError if the objective is unknown or refuses its options.

    Hosts create the objective. The coordinator checks it only if the client software is installed.
    """
    check_installed(plugins.OBJECTIVES, table.name)
    try:
        plugins.check(plugins.OBJECTIVES, table.name, table.options)
    except ConfigurationError as error:
        # ignore a missing package: only hosts need it
        if not isinstance(error.__cause__, ImportError):
            raise type(error)(f"{source}: {error.message}", **error.metadata) from None


def check_installed(group: str, name: str) -> None:
    """Raise PluginError, listing the installed plug-ins, unless the plug-in `name` of this group is
    installed."""
    if name not in plugins.installed(group):
        raise plugins.not_installed(group, name)
