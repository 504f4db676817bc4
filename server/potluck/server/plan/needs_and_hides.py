"""Table of the properties (traits) of a run's parts, and of the traits that hide others; checked
before a run starts.

A part of a run (selector, strategy, trainer, a table of the run file) has `Trait`s: for example, it
needs single updates, or masks them. `HIDES` lists, for each trait, the traits that it hides, each
with the error message. If a run has a trait and also one that it hides, the run is refused with the
message of the first such pair.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Final

from potluck.common.errors import ConfigurationError, PluginError
from potluck.common.learning.step_by_step import UNSAFE_STEPWISE
from potluck.common.run_file.run_settings import DirectionSettings
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings import plugins
from potluck.common.settings.local_training import LocalTraining
from potluck.common.signal import signal_named
from potluck.common.trainer import Capability, Trainer
from potluck.common.updates.fixed_point import MOST_MEMBERS
from potluck.server.selection import Selector, Signal, UpdateFact
from potluck.server.strategy import Strategy, Summation


class Trait(Enum):
    """Property of a part of a run that decides with which other parts it is compatible."""

    # traits of strategies
    SINGLE_UPDATES = auto()
    """The strategy needs every single update, not only the updates' mean."""
    OWN_TENSORS = auto()
    """The strategy changes some tensors of the model only on the coordinator."""
    AUXILIARIES = auto()
    """The strategy sends tensors (auxiliaries) in addition to the weights."""
    CORRECTION = auto()
    """The strategy makes hosts correct what clients send, or how clients train."""
    DATA_CORRECTION = auto()
    """The strategy makes hosts compute what clients send from data, not only from the steps'
    gradients."""
    KEPT_CORRECTION = auto()
    """The strategy makes clients keep a state from one training for the next."""
    SINGLE_STEPS = auto()
    """The strategy corrects or counts the single steps of a training."""
    OTHER_WEIGHTS = auto()
    """The strategy does not weight updates by samples."""
    SERVER_TRAINING = auto()
    """The strategy trains on the coordinator, and uses single updates for that."""
    GROUPS = auto()
    """The strategy makes clients train different parts of the model, or uses their profiles."""
    # traits of selectors
    REPORTS = auto()
    """The selector needs numbers that clients report with their updates."""
    FACTS = auto()
    """The selector needs facts that the coordinator computes from single updates."""
    OUTPUT_MOVES = auto()
    """The selector needs each update's change of the output layer."""
    MEANS = auto()
    """The selector requests the loss of models that are means of some updates."""
    WEIGHTS = auto()
    """The selector sets the weights of updates."""
    QUOTAS = auto()
    """The selector limits each client's number of training samples."""
    PASSES = auto()
    """The selector sets each client's number of passes over its samples."""
    PARTIAL_UPDATES = auto()
    """The selector makes clients omit tensors from their updates."""
    OFFERS = auto()
    """The selector asks clients a question after their training, before the upload."""
    EVERYBODY = auto()
    """The selector makes all clients train in some rounds."""
    ESTIMATES = auto()
    """The selector needs signals that clients estimate by training the whole model."""
    NOT_GIVEN = auto()
    """The selector asks for something that the task's trainer does not provide."""
    QUESTIONS = auto()
    """The selector asks clients questions about their data or a model."""
    PLAIN_QUESTIONS = auto()
    """The selector asks clients questions whose answers can't have noise."""
    PROFILES = auto()
    """The selector uses profiles: what clients disclose once about their data."""
    UNHIDDEN_PROFILES = auto()
    """The selector uses profiles that no noise makes private for single records."""
    # traits of the run file and the task
    OWN_TRAINER = auto()
    """The task has its own trainer."""
    NOISELESS_TRAINER = auto()
    """The task has its own trainer, without the capability `privacy`."""
    DIVIDED_MODEL = auto()
    """Clients receive only a part of the model."""
    KEPT_TENSORS = auto()
    """Clients keep some tensors of the model and never send them."""
    OWN_MODELS = auto()
    """Each client also trains its own model, close to the run's model."""
    OBJECTIVE = auto()
    """The run file names a loss for the built-in training loop."""
    COUNTED_STEPS = auto()
    """The run file sets a training's number of steps, not of passes over the samples."""
    MASKS = auto()
    """Updates are masked; the coordinator learns only their sums."""
    HOST_SUMS = auto()
    """Each host sends the sum of its clients' updates."""
    LATE_UPDATES = auto()
    """Updates may join a later round."""
    UPLOAD_FORM = auto()
    """The run file sets an encoding or compression of updates."""
    SIMULATED_TIME = auto()
    """Clients report simulated seconds, for a virtual clock."""
    TRACED_CLIENTS = auto()
    """Clients are available at the times in a trace."""
    SIMULATED_LOSSES = auto()
    """The run excludes updates of clients that take too many simulated seconds."""
    EXACT_PROFILES = auto()
    """Clients disclose profiles or sums without noise."""
    PRIVATE_RECORDS = auto()
    """Trainings have noise that hides single records."""
    PRIVATE_CLIENTS = auto()
    """Updates or models have noise that hides single clients."""
    OPEN_UPDATES = auto()
    """Updates are not masked, and their sum has no noise of the coordinator."""
    NOISED_SUMS = auto()
    """The coordinator adds noise to the sum of a round's clipped updates."""
    TUNED_MODELS = auto()
    """Clients train a model further before they measure it."""
    LARGE_COHORT = auto()
    """Cohorts have more clients than the maximum of a host's sum."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run whose traits are compared before the run starts.

    trainer: the task's own trainer; None for the built-in loop.
    """

    run_file: RunFile
    selector: Selector
    strategy: Strategy
    training: LocalTraining
    trainer: Trainer | None = None

    @cached_property
    def traits(self) -> Mapping[Trait, str]:
        """The run's traits, each with a detail for messages."""
        found = {**self._of_strategy(), **self._of_selector(), **self._of_run_file()}
        return {trait: str(detail) for trait, detail in found.items() if detail}

    def _of_strategy(self) -> Mapping[Trait, object]:
        strategy, correction = self.strategy, self.strategy.correction
        normalized = strategy.summation is Summation.NORMALIZED
        return {
            Trait.SINGLE_UPDATES: strategy.individual,
            Trait.OWN_TENSORS: bool(strategy.one_way),
            Trait.AUXILIARIES: bool(strategy.auxiliary),
            Trait.CORRECTION: correction is not None,
            Trait.DATA_CORRECTION: (correction is not None and not correction.of_gradients)
            or (correction is None and bool(strategy.auxiliary)),
            Trait.KEPT_CORRECTION: correction is not None and correction.keeps,
            Trait.SINGLE_STEPS: "corrects" if correction else "counts" if normalized else "",
            Trait.OTHER_WEIGHTS: not strategy.by_samples,
            Trait.SERVER_TRAINING: strategy.trains,
            Trait.GROUPS: strategy.parts or bool(strategy.needs_profiles),
        }

    def _of_selector(self) -> Mapping[Trait, object]:
        traits = {
            **selector_traits(self.selector),
            Trait.NOT_GIVEN: " and ".join(self._not_given()),
        }
        if self.trainer is not None:  # with a task's own trainer, no answer can have noise
            traits[Trait.PLAIN_QUESTIONS] = traits[Trait.QUESTIONS]
        return traits

    def _not_given(self) -> list[str]:
        if self.trainer is None:
            return []
        selector = self.selector
        wanted = {*selector.needs_profiles, *selector.asks_questions, *selector.reports}
        stepwise = self.run_file.profiles.disclosure == UNSAFE_STEPWISE
        if selector.wants_label_totals or stepwise:
            wanted.add(Signal.LABEL_COUNTS)
        return sorted(str(each) for each in wanted - self.trainer.capabilities)

    def _of_run_file(self) -> Mapping[Trait, object]:
        run_file, clock, model = self.run_file, self.run_file.virtual_clock, self.run_file.model
        spares = run_file.round.over_selection
        cohort = run_file.clients_per_round + spares
        objective = "objective" in run_file.model_fields_set
        privacy = run_file.privacy
        unit: str = "" if privacy is None else privacy.unit
        noised = privacy is not None and privacy.at_coordinator
        return {
            Trait.OWN_TRAINER: self.trainer is not None,
            Trait.NOISELESS_TRAINER: self.trainer is not None
            and Capability.PRIVACY not in self.trainer.capabilities,
            Trait.DIVIDED_MODEL: model is not None and model.divides,
            Trait.KEPT_TENSORS: model is not None and bool(model.keep),
            Trait.OWN_MODELS: run_file.personal.method == "ditto",
            Trait.OBJECTIVE: run_file.objective[0].name if objective else "",
            Trait.COUNTED_STEPS: self.training.steps is not None,
            Trait.MASKS: run_file.secure_aggregation,
            Trait.HOST_SUMS: run_file.host_sums.enabled,
            Trait.LATE_UPDATES: run_file.round.late_updates.rounds,
            Trait.UPLOAD_FORM: run_file.transport.up != DirectionSettings(),
            Trait.SIMULATED_TIME: clock.enabled,
            Trait.TRACED_CLIENTS: clock.enabled and clock.trace is not None,
            Trait.SIMULATED_LOSSES: clock.enabled and bool(clock.deadline_seconds or spares),
            Trait.EXACT_PROFILES: self._exact_profiles(),
            Trait.PRIVATE_RECORDS: unit == "record",
            Trait.PRIVATE_CLIENTS: unit == "client",
            Trait.OPEN_UPDATES: not (run_file.secure_aggregation or noised),
            Trait.NOISED_SUMS: noised,
            Trait.TUNED_MODELS: run_file.evaluation.fine_tune_epochs,
            Trait.LARGE_COHORT: str(cohort) if cohort > MOST_MEMBERS else "",
        }

    def _exact_profiles(self) -> str:
        """Return the setting by which clients disclose profiles or sums without noise; empty if
        there is none."""
        profiles, selector = self.run_file.profiles, self.selector
        needs = selector.needs_profiles or self.strategy.needs_profiles
        if not (needs or selector.wants_label_totals):
            return ""
        if profiles.disclosure in ("exact", UNSAFE_STEPWISE):
            return f'profiles.disclosure = "{profiles.disclosure}"'
        return 'profiles.sum_mode = "exact"' if profiles.sum_mode == "exact" else ""


def selector_traits(selector: Selector) -> Mapping[Trait, object]:
    """Return a detail for each trait that selectors can have; empty or false if this selector lacks
    the trait."""
    signals = {str(name): signal_named(name) for name in selector.needs_profiles}
    unhidden = sorted(name for name, signal in signals.items() if not signal.hides_records)
    asked = sorted(set(selector.asks_questions) - {AVAILABILITY})
    offered = selector.before_upload(2)
    return {
        Trait.REPORTS: ", ".join(sorted(selector.reports)),
        Trait.FACTS: ", ".join(sorted(selector.needs_facts)),
        Trait.OUTPUT_MOVES: UpdateFact.OUTPUT_MOVE in selector.needs_facts,
        Trait.MEANS: selector.measures,
        Trait.WEIGHTS: selector.sets_weights,
        Trait.QUOTAS: selector.sets_quotas,
        Trait.PASSES: selector.sets_epochs,
        Trait.PARTIAL_UPDATES: selector.drops_tensors,
        Trait.OFFERS: "" if offered is None else offered.kind,
        Trait.QUESTIONS: " and ".join(asked),
        Trait.PLAIN_QUESTIONS: " and ".join(kind for kind in asked if not has_noisy_form(kind)),
        Trait.EVERYBODY: selector.everybody(1),
        Trait.PROFILES: ", ".join(sorted(signals)),
        Trait.UNHIDDEN_PROFILES: ", ".join(unhidden),
        Trait.ESTIMATES: any(signal.needs_model for signal in signals.values()),
    }


def has_noisy_form(kind: str) -> bool:
    """Return True if a question can be answered with noise that hides single records.

    False if the question is not installed on the coordinator."""
    try:
        question = plugins.find(plugins.QUESTIONS, kind)
    except PluginError:
        return False
    return bool(getattr(question, "hides_records", False))


AVAILABILITY: Final = "availability"
"""Question about the times at which an owner plans to be available, not about data."""
OF_MODELS: Final = (Trait.DIVIDED_MODEL, Trait.KEPT_TENSORS)
"""Traits of a run whose clients receive or send only a part of the model."""
OF_STRATEGIES: Final = (
    Trait.OTHER_WEIGHTS,
    Trait.OWN_TENSORS,
    Trait.SINGLE_UPDATES,
    Trait.SERVER_TRAINING,
    Trait.AUXILIARIES,
    Trait.COUNTED_STEPS,
)
"""Traits of strategies and their training that hide something from selectors."""


def check_hidden(parts: RunParts, *hiders: Trait, source: str) -> None:
    """Raise ConfigurationError if the run has one of the traits `hiders`, and this hides another
    trait of the run."""
    run_file, traits = parts.run_file, parts.traits
    names = {
        "selector": run_file.selector.name,
        "strategy": run_file.strategy.name,
        "task": run_file.task.name,
        "steps": parts.training.steps,
    }
    for hider in hiders:
        for hidden, refusal in HIDES[hider].items():
            if hider in traits and hidden in traits:
                fields = {**names, "detail": traits[hidden]}
                used = {field for _, field, _, _ in string.Formatter().parse(refusal) if field}
                about = {name: names[name] for name in names if name in used}
                raise ConfigurationError(f"{source}: {refusal.format(**fields)}", **about)


# The refusals, in parts ---------------------------------------------------------------------------

_MASKED_STRATEGY = "strategy {strategy} and secure aggregation are not compatible: "
_MASKED_SELECTOR = "selector {selector} and secure aggregation are not compatible: {selector} "
_OF_SUMS = (
    ", and the coordinator learns only sums of masked updates; choose another selector, or "
    "unmasked updates"
)
_ALIKE = f", but all clients of a masked round must train alike{_OF_SUMS}"
_KEPT_FOR_MASKS = (
    " is not compatible with secure aggregation: clients begin from states of earlier trainings, "
    "and a coordinator that names another one to a client could compute its update from the sums; "
    "choose fedavg or fednova without `keep`, or unmasked updates"
)
_SUMMED_STRATEGY = "strategy {strategy} and host_sums are not compatible: "
_AVERAGES = "; choose a strategy that averages (fedavg, fedavgm, fedadam, fednova, …), or no sums"
_SUMMED_SELECTOR = "selector {selector} and host_sums are not compatible: {selector} "
_NO_SUMS = "; choose another selector, or no sums"
_LATE = "round.late_updates is not compatible with "
_NOT_LATE = "; set round.late_updates.rounds = 0, or choose another"
_LATE_BESIDE = (
    f"{_LATE}strategy {{strategy}}: the tensors that its clients send in addition to the weights "
    f"belong to one round{_NOT_LATE}"
)
_LATE_MORE = (
    f"{_LATE}strategy {{strategy}}: its updates are not just changes of one model{_NOT_LATE}"
)
_PAIR = "selector {selector} and strategy {strategy} are not compatible: {selector} "
_OTHER_PAIR = (
    "; choose another strategy (fedavg, fedadam, fednova, …), or other options of {selector}"
)
_WHOLE = (
    f"{_PAIR}has clients omit tensors from their updates, and {{strategy}} needs whole updates"
    f"{_OTHER_PAIR}"
)
_BY_ITSELF = ", and task '{task}' has its own trainer"
_OTHER_STRATEGY = "; choose another strategy (fedavg, fedadam)"

_PRIVATE_SELECTOR = "selector {selector} is not compatible with [privacy]: {selector} "
_PRIVATE_STRATEGY = "strategy {strategy} is not compatible with [privacy]: "
_HIDDEN_STRATEGY = 'strategy {strategy} is not compatible with privacy.unit = "client": '
_PLAIN_MEAN = "; choose fedavg, fedavgm or fedadam, or remove [privacy]"
_EXACT_PROFILES = (
    "{detail} is not compatible with [privacy]: it discloses counts of records without noise; set "
    'it to "noisy", or remove [privacy]'
)
_NO_NOISE = (
    "; choose a selector that goes by profiles or updates (uniform, fedentopt, …), or remove "
    "[privacy]"
)
_HIDES_CLIENTS = (
    "; choose a selector that asks nothing of single updates (uniform, round-robin, fedentopt, …), "
    "or remove [privacy]"
)
_OF_ONE_CLIENT = f", and no noise hides a single client in it{_HIDES_CLIENTS}"

_UNHIDDEN_PROFILES = (
    f"{_PRIVATE_SELECTOR}needs {{detail}} of each client, and no noise hides single records in it"
    f"{_NO_NOISE}"
)

HIDES: Final[Mapping[Trait, Mapping[Trait, str]]] = {
    Trait.MASKS: {
        Trait.SINGLE_UPDATES: f"{_MASKED_STRATEGY}{{strategy}} reads single updates, and the "
        "coordinator learns only the sum of masked ones; choose a strategy that averages (fedavg, "
        "fedavgm, fedadam, fednova, …), or unmasked updates",
        Trait.OWN_TENSORS: f"{_MASKED_STRATEGY}masked updates have all tensors of the model, and "
        "{strategy} changes some on the coordinator; choose another strategy, or unmasked updates",
        # The coordinator names, for each client, the training whose state the client uses. So a
        # malicious coordinator could learn a single update from two sums.
        Trait.KEPT_CORRECTION: f"strategy {{strategy}}{_KEPT_FOR_MASKS}",
        Trait.KEPT_TENSORS: f"`keep` of [model]{_KEPT_FOR_MASKS}",
        Trait.REPORTS: f"{_MASKED_SELECTOR}needs numbers that each client reports with its update "
        f"({{detail}}){_OF_SUMS}",
        Trait.FACTS: f"{_MASKED_SELECTOR}needs each update's {{detail}}{_OF_SUMS}",
        Trait.MEANS: f"{_MASKED_SELECTOR}needs the loss of means of some updates{_OF_SUMS}",
        Trait.WEIGHTS: f"{_MASKED_SELECTOR}sets the weight of each update{_OF_SUMS}",
        Trait.QUOTAS: f"{_MASKED_SELECTOR}limits the samples that each client trains on{_ALIKE}",
        Trait.PASSES: f"{_MASKED_SELECTOR}sets the number of passes of each client{_ALIKE}",
        Trait.PARTIAL_UPDATES: f"{_MASKED_SELECTOR}sets which tensors each client omits{_ALIKE}",
        Trait.OFFERS: f"{_MASKED_SELECTOR}skips uploads by each client's answer to {{detail}}, and "
        "masks are removed from all updates of a cohort together; choose another selector, or "
        "unmasked updates",
        Trait.EVERYBODY: f"{_MASKED_SELECTOR}has all clients train in a round, and the sum of a "
        "masked round is over as many clients as the run asks for; choose another selector or "
        "option, or unmasked updates",
        Trait.UPLOAD_FORM: "transport.up and secure aggregation are not compatible: masked updates "
        "have an encoding of their own, and masks don't compress; remove [transport.up]",
        Trait.SIMULATED_TIME: "virtual_clock and secure aggregation are not compatible: the "
        "simulated seconds that a client reports reveal its number of samples; remove one of them",
    },
    Trait.HOST_SUMS: {
        Trait.MASKS: "secure_aggregation and host_sums are not compatible: masked updates are "
        "added up anyway; remove one of them",
        Trait.UPLOAD_FORM: "transport.up and host_sums are not compatible: sums have an encoding "
        "of their own, and are differences; remove [transport.up]",
        Trait.SIMULATED_LOSSES: "virtual_clock and host_sums are not compatible: on a virtual "
        "clock updates that have arrived are excluded because of their simulated seconds; remove "
        "virtual_clock.deadline_seconds and round.over_selection",
        Trait.LARGE_COHORT: "a cohort of {detail} and host_sums are not compatible: sums are over "
        f"{MOST_MEMBERS} at most; lower `clients_per_round`",
        Trait.SINGLE_UPDATES: f"{_SUMMED_STRATEGY}{{strategy}} reads single updates, and the "
        f"coordinator gets sums of them{_AVERAGES}",
        Trait.OWN_TENSORS: f"{_SUMMED_STRATEGY}sums have all tensors of the model, and "
        f"{{strategy}} changes some on the coordinator{_AVERAGES}",
        Trait.SERVER_TRAINING: f"{_SUMMED_STRATEGY}{{strategy}} trains on the coordinator with "
        f"single updates{_AVERAGES}",
        Trait.FACTS: f"{_SUMMED_SELECTOR}needs each update's {{detail}}{_NO_SUMS}",
        Trait.MEANS: f"{_SUMMED_SELECTOR}needs the loss of means of some updates{_NO_SUMS}",
        Trait.WEIGHTS: f"{_SUMMED_SELECTOR}sets the weight of each update{_NO_SUMS}",
        Trait.PARTIAL_UPDATES: f"{_SUMMED_SELECTOR}sets which tensors each client omits{_NO_SUMS}",
        Trait.OFFERS: f"{_SUMMED_SELECTOR}skips uploads by each client's answer to {{detail}}"
        f"{_NO_SUMS}",
    },
    Trait.PRIVATE_RECORDS: {
        Trait.NOISELESS_TRAINER: "task '{task}' is not compatible with [privacy]: its trainer does "
        "not declare the capability `privacy`, so its updates would have no noise; train with "
        "`settings.noisy_steps` and declare it, choose another task, or remove [privacy]",
        Trait.DATA_CORRECTION: f"{_PRIVATE_STRATEGY}clients compute tensors from records without "
        "noise, and send them beside their weights; choose fedavg, fedavgm, fedadam or scaffold, "
        "or remove [privacy]",
        Trait.PLAIN_QUESTIONS: f"{_PRIVATE_SELECTOR}asks clients for {{detail}}, and the answers "
        f"have no noise{_NO_NOISE}",
        Trait.OFFERS: f"{_PRIVATE_SELECTOR}asks clients for {{detail}} before the upload, and the "
        f"answers have no noise{_NO_NOISE}",
        Trait.UNHIDDEN_PROFILES: _UNHIDDEN_PROFILES,
        Trait.EXACT_PROFILES: _EXACT_PROFILES,
        Trait.REPORTS: f"{_PRIVATE_SELECTOR}wants {{detail}} reported with updates, without noise"
        f"{_NO_NOISE}",
        Trait.QUOTAS: f"{_PRIVATE_SELECTOR}limits the samples of each class, so that one record "
        f"decides about others{_NO_NOISE}",
        Trait.OWN_MODELS: 'personal.method = "ditto" is not compatible with [privacy]: a client\'s '
        "own model is trained without noise; remove one of them",
        Trait.TUNED_MODELS: "evaluation.fine_tune_epochs is not compatible with [privacy]: the "
        "measured model is trained without noise; set evaluation.fine_tune_epochs = 0",
    },
    Trait.PRIVATE_CLIENTS: {
        Trait.OPEN_UPDATES: 'privacy.unit = "client" with noise of the clients needs masked '
        "updates: a client's own share of the noise hides its update only in a sum; set "
        "secure_aggregation = true",
        Trait.SINGLE_STEPS: f"{_HIDDEN_STRATEGY}it {{detail}} the single steps of each client, and "
        f"the noise is for updates of equal weights{_PLAIN_MEAN}",
        Trait.CORRECTION: f"{_HIDDEN_STRATEGY}it has clients correct their steps with numbers "
        f"without noise{_PLAIN_MEAN}",
        Trait.AUXILIARIES: f"{_HIDDEN_STRATEGY}clients send tensors without noise beside their "
        f"weights{_PLAIN_MEAN}",
        Trait.GROUPS: f"{_HIDDEN_STRATEGY}clients train parts of the model by their profiles"
        f"{_PLAIN_MEAN}",
        Trait.OWN_MODELS: 'personal.method = "ditto" is not compatible with privacy.unit = '
        '"client": what is measured of a client\'s own model has no noise; remove one of them',
        Trait.TUNED_MODELS: "evaluation.fine_tune_epochs is not compatible with [privacy]: the "
        "measured model is trained without noise; set evaluation.fine_tune_epochs = 0",
        Trait.OFFERS: f"{_PRIVATE_SELECTOR}skips uploads by each client's answer to {{detail}}"
        f"{_OF_ONE_CLIENT}",
        Trait.QUESTIONS: f"{_PRIVATE_SELECTOR}asks clients for {{detail}}{_OF_ONE_CLIENT}",
        Trait.REPORTS: f"{_PRIVATE_SELECTOR}wants {{detail}} reported with updates{_OF_ONE_CLIENT}",
        Trait.FACTS: f"{_PRIVATE_SELECTOR}needs each update's {{detail}}{_OF_ONE_CLIENT}",
        Trait.MEANS: f"{_PRIVATE_SELECTOR}measures means of some updates{_OF_ONE_CLIENT}",
        Trait.WEIGHTS: f"{_PRIVATE_SELECTOR}sets the weight of each update, and the noise is for "
        f"equal weights{_HIDES_CLIENTS}",
        Trait.PARTIAL_UPDATES: f"{_PRIVATE_SELECTOR}has clients omit tensors, and the noise is for "
        f"whole updates{_HIDES_CLIENTS}",
        Trait.EVERYBODY: f"{_PRIVATE_SELECTOR}has all clients train in a round, and the noise is "
        f"for clients_per_round of them{_HIDES_CLIENTS}",
        Trait.UNHIDDEN_PROFILES: _UNHIDDEN_PROFILES,
        Trait.EXACT_PROFILES: _EXACT_PROFILES,
    },
    Trait.NOISED_SUMS: {
        Trait.MASKS: 'secure_aggregation is not compatible with privacy.noise = "coordinator": the '
        "coordinator can't clip updates that it can't see; remove one of them",
        Trait.HOST_SUMS: 'host_sums is not compatible with privacy.noise = "coordinator": the '
        "coordinator can't clip single updates in a sum; remove one of them",
        Trait.LATE_UPDATES: "round.late_updates is not compatible with privacy.noise = "
        '"coordinator": noise is for the updates of one round; set round.late_updates.rounds = 0',
        Trait.SINGLE_UPDATES: f"{_HIDDEN_STRATEGY}it reads single updates, without noise"
        f"{_PLAIN_MEAN}",
        Trait.SERVER_TRAINING: f"{_HIDDEN_STRATEGY}it trains on the coordinator with single "
        f"updates, without noise{_PLAIN_MEAN}",
        Trait.OWN_TENSORS: f"{_HIDDEN_STRATEGY}it changes some tensors on the coordinator, and the "
        f"sum with noise has all of them{_PLAIN_MEAN}",
    },
    Trait.LATE_UPDATES: {
        Trait.MASKS: f"{_LATE}secure aggregation: a masked sum is over the clients of one round"
        f"{_NOT_LATE}",
        Trait.AUXILIARIES: _LATE_BESIDE,
        Trait.CORRECTION: _LATE_BESIDE,
        Trait.OTHER_WEIGHTS: f"{_LATE}strategy {{strategy}}: it does not weight updates by samples "
        f"and by age{_NOT_LATE}",
        Trait.OWN_TENSORS: _LATE_MORE,
        Trait.SERVER_TRAINING: _LATE_MORE,
        Trait.GROUPS: _LATE_MORE,
        Trait.HOST_SUMS: f"{_LATE}host_sums: a sum is over clients of one round{_NOT_LATE}",
        Trait.TRACED_CLIENTS: f"{_LATE}virtual_clock.trace: a client that misses its round may be "
        f"unavailable afterwards{_NOT_LATE}",
        Trait.PARTIAL_UPDATES: f"{_LATE}selector {{selector}}: it has clients omit tensors from "
        f"their updates{_NOT_LATE}",
        Trait.WEIGHTS: f"{_LATE}selector {{selector}}: its weights are for a complete cohort"
        f"{_NOT_LATE}",
        Trait.OFFERS: f"{_LATE}selector {{selector}}: it chooses among the updates of one round "
        f"before they are sent{_NOT_LATE}",
    },
    Trait.OWN_TRAINER: {
        Trait.GROUPS: "strategy {strategy} has groups of clients train parts of a network in the "
        f"built-in loop{_BY_ITSELF}{_OTHER_STRATEGY}",
        Trait.NOT_GIVEN: "selector {selector} asks clients for {detail}, which the trainer of task "
        "'{task}' does not provide; choose a selector that does not ask for it (uniform, "
        "round-robin), or add it to the trainer and its capabilities",
        Trait.SINGLE_STEPS: "strategy {strategy} {detail} the single steps of the built-in loop"
        f"{_BY_ITSELF}{_OTHER_STRATEGY}",
        Trait.SERVER_TRAINING: "strategy {strategy} trains a classifier on the coordinator"
        f"{_BY_ITSELF}{_OTHER_STRATEGY}",
        Trait.OWN_MODELS: 'personal.method = "ditto" holds the steps of the built-in loop to the '
        f"round's model{_BY_ITSELF}; remove [personal], or set evaluation.fine_tune_epochs",
        Trait.OBJECTIVE: "objective {detail} is a loss for the built-in loop, and task '{task}' "
        "has its own; remove [objective]",
    },
    Trait.DIVIDED_MODEL: {
        Trait.ESTIMATES: "selector '{selector}' needs triplets, which clients estimate by training "
        "all of the model; remove `trainable` and `keep` of [model], or choose another selector",
    },
    Trait.KEPT_TENSORS: {
        Trait.OUTPUT_MOVES: "selector '{selector}' needs the updates' changes of the output layer, "
        "which may be among the tensors that clients `keep` of [model]; choose another selector",
        Trait.OWN_MODELS: 'personal.method = "ditto" gives each client a whole model of its own, '
        "and `keep` of [model] gives it own tensors in the run's model; remove one of them",
    },
    Trait.OTHER_WEIGHTS: {
        Trait.WEIGHTS: f"{_PAIR}sets the weight of each update, and {{strategy}} ignores these "
        f"weights{_OTHER_PAIR}",
    },
    Trait.OWN_TENSORS: {
        Trait.MEANS: f"{_PAIR}needs the loss of means of updates, and updates of {{strategy}} are "
        f"only part of a model{_OTHER_PAIR}",
    },
    Trait.SINGLE_UPDATES: {Trait.PARTIAL_UPDATES: _WHOLE},
    Trait.SERVER_TRAINING: {
        Trait.PARTIAL_UPDATES: _WHOLE,
        Trait.KEPT_TENSORS: "strategy {strategy} trains on the coordinator, which has no whole "
        "model where clients `keep` tensors of [model]; choose another strategy",
    },
    Trait.AUXILIARIES: {Trait.PARTIAL_UPDATES: _WHOLE},
    Trait.COUNTED_STEPS: {
        Trait.PASSES: "selector {selector} sets how many passes over its samples each client "
        "makes, and training.steps = {steps} counts steps; set training.epochs instead, or other "
        "options of {selector}",
    },
}
"""Traits that each trait hides, with the error message of each.

A message is one line with the fields `selector`, `strategy`, `task`, `steps` and `detail` (of the
hidden trait).
"""
