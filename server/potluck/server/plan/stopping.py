"""Rules that decide by a metric which model of a run is its best, and whether the run ends early.

Takes a run file, returns a rule. The rule takes a round's metrics and returns the record to store
with the round. Pure. Imports `store` for its records, and strategies' declarations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from potluck.common.errors import ConfigurationError
from potluck.common.learning.measures import (
    CLASSIFICATION,
    TRAINING,
    WORST_GROUP,
    MeasuredModel,
    of_model,
    shown_measures,
)
from potluck.common.run_file.runfile import RunFile
from potluck.common.settings.wanted import meant
from potluck.common.task import Task
from potluck.common.trainer import Measure, Trainer
from potluck.server.store.records import BestSoFar
from potluck.server.strategy import Strategy

# The rule -----------------------------------------------------------------------------------------
# Pure: no clock, no disk.
#
# The state of a rule is a `BestSoFar`, which is stored with each round. After a kill, the resumed
# run loads this state and ends in the same round as without the kill.


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """The rule of one run.

    measure: name of the metric. patience, minimum_delta, target: as in `Stopping`; patience and
    target are both None if the rule only tracks the best model. opening: number of rounds at the
    start whose evaluations are ignored.
    """

    measure: str
    higher_is_better: bool
    patience: int | None = None
    minimum_delta: float = 0.0
    target: float | None = None
    opening: int = 0

    def after(
        self, so_far: BestSoFar | None, round_number: int, value: float | None
    ) -> BestSoFar | None:
        """Return the record after one more evaluation; None before the first evaluation that
        counts.

        value: value of the metric; None or NaN if the evaluation did not include the metric.
        """
        if round_number <= self.opening:
            return so_far
        before = so_far or BestSoFar(measure=self.measure)
        if value is None or math.isnan(value):
            return replace(before, stalled=before.stalled + 1)
        after = before
        if before.value is None or self._is_better(value, before.value):
            after = replace(after, round=round_number, value=value)
        if before.mark is None or self._is_better(value, before.mark, by=self.minimum_delta):
            return replace(after, mark=value, stalled=0)
        return replace(after, stalled=before.stalled + 1)

    def why_over(self, so_far: BestSoFar | None) -> str:
        """Return the reason why the run ends early; empty if it continues."""
        if so_far is None:
            return ""
        best = "" if so_far.value is None else f"{so_far.value:.6g} in round {so_far.round}"
        target, patience = self.target, self.patience
        if (
            target is not None
            and so_far.value is not None
            and (so_far.value == target or self._is_better(so_far.value, target))
        ):
            return f"stopped early: {self.measure} is {best}, and stop.target {target:g}"
        if patience is None or so_far.stalled < patience:
            return ""
        evaluations = f"{patience} evaluation{'s' * (patience > 1)}"
        if not best:
            return f"stopped early: {self.measure} was not measured in {evaluations}"
        by = f" by more than {self.minimum_delta:g}" if self.minimum_delta else ""
        return (
            f"stopped early: {self.measure} has not improved{by} in {evaluations}; its best is "
            f"{best}"
        )

    def _is_better(self, value: float, than: float, *, by: float = 0.0) -> bool:
        """Return True if a value is better than another by more than `by`."""
        return value > than + by if self.higher_is_better else value < than - by


# Checks before a start ----------------------------------------------------------------------------

_TRAINING_LOSS = f"{TRAINING}loss"


def stop_rule(
    run_file: RunFile, task: Task, trainer: Trainer | None, strategy: Strategy, *, source: str
) -> StopRule | None:
    """Return the rule for a run's best model and its early end; None if the run file has none.

    Raises ConfigurationError if the rule's metric is never measured in this run, or its target is
    impossible.
    """
    name, stop = run_file.followed, run_file.stop
    if name is None:
        return None
    key = "retention.keep_best" if stop is None else "stop.measure"
    known = _known(run_file, task, trainer)
    if name not in known:
        raise ConfigurationError(
            f"{source}: '{key}' is '{name[:80]}', which this run does not measure"
            f"{meant(name, known)}; it measures: {', '.join(known)}"
            f"{_how_to_measure(name, run_file)}",
            measure=name[:80],
        )
    if not run_file.evaluation.every and not name.startswith(TRAINING):
        raise ConfigurationError(
            f"{source}: '{key}' is '{name}', but with evaluation.every = 0 no model is "
            "evaluated; set evaluation.every = 1, or a larger number if evaluations take long",
            measure=name,
        )
    measure = known[name]
    if stop is None:
        return StopRule(
            measure=name,
            higher_is_better=measure.higher_is_better,
            opening=strategy.opening,
        )
    if stop.target is not None and not measure.lowest <= stop.target <= measure.highest:
        raise ConfigurationError(
            f"{source}: 'stop.target' is {stop.target:g}, but {name} is always from "
            f"{measure.lowest:g} to {measure.highest:g}; set a target in this range",
            measure=name,
            target=stop.target,
        )
    if strategy.opening >= run_file.rounds:
        raise ConfigurationError(
            f"{source}: with strategy {run_file.strategy.name} the first {strategy.opening} "
            f"rounds don't count for [stop], but the run has only {run_file.rounds} rounds; "
            "raise `rounds`, or remove [stop]",
            strategy=run_file.strategy.name,
        )
    return StopRule(
        measure=name,
        higher_is_better=measure.higher_is_better,
        patience=stop.patience,
        minimum_delta=stop.minimum_delta,
        target=stop.target,
        opening=strategy.opening,
    )


def remarks_on_best(run_file: RunFile) -> tuple[str, ...]:
    """Return a remark if the stored best model lacks parts of the model that were used to measure
    its metric."""
    name, table = run_file.followed, run_file.model
    if name is None:
        return ()
    found: list[str] = []
    if table is not None and table.keep:
        found.append(
            "[model] keep: the best model is stored without the tensors that clients keep, "
            "because clients store only the newest values"
        )
    if name.startswith(MeasuredModel.PERSONAL):
        found.append(
            f"{name} measures the clients' own models, of which clients store only the newest; "
            "the stored best model is the run's model of the round with the best value"
        )
    return tuple(found)


def _known(run_file: RunFile, task: Task, trainer: Trainer | None) -> Mapping[str, Measure]:
    """Return the metrics that the run measures, by name."""
    if trainer is None:
        own = {
            name: measure
            for name, measure in CLASSIFICATION.items()
            if name != WORST_GROUP or task.groups
        }
        known = dict(own)
        # with an evaluation in every round, the training loss is shown only if no other loss is
        # measured
        if run_file.evaluation.every != 1:
            known[_TRAINING_LOSS] = Measure(label="training loss")
    else:
        own = dict(trainer.measures)
        # Masked updates have no metrics of the clients' trainings.
        known = dict(own) if run_file.secure_aggregation else shown_measures(own)
    if run_file.evaluation.fine_tune_epochs:
        known |= of_model(own, MeasuredModel.TUNED)
    if run_file.personal.method == "ditto":
        known |= of_model(own, MeasuredModel.PERSONAL)
    return known


def _how_to_measure(name: str, run_file: RunFile) -> str:
    """Return a hint about how to measure a metric that only other runs measure; "" without a
    hint."""
    if name.startswith(MeasuredModel.TUNED) and not run_file.evaluation.fine_tune_epochs:
        return "; tuned_… needs evaluation.fine_tune_epochs"
    if name.startswith(MeasuredModel.PERSONAL) and run_file.personal.method != "ditto":
        return '; personal_… needs personal.method = "ditto"'
    if name == _TRAINING_LOSS and run_file.evaluation.every == 1:
        return "; training_loss needs an evaluation.every that is not 1"
    if name == WORST_GROUP:
        return "; the task has no groups"
    return ""
