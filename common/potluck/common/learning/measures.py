"""The measures that a task declares, and sums of what clients measured.

Clients send sums and counts, which can be added, so the mean equals that over all clients' samples.
The samples stay with their clients.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from potluck.common.errors import ConfigurationError, TrainerError
from potluck.common.task import Task
from potluck.common.trainer import SHARE, Capability, Measure, Measured, Measures, Trainer

WORST_GROUP: Final = "worst_group_accuracy"
"""Name of the measure that only tasks with groups have."""
CLASSIFICATION: Final[Mapping[str, Measure]] = {
    "loss": Measure(label="loss"),
    "accuracy": Measure(label="accuracy", unit=SHARE, higher_is_better=True, lowest=0, highest=1),
    WORST_GROUP: Measure(
        label="worst group", unit=SHARE, higher_is_better=True, lowest=0, highest=1
    ),
    "weighted_f1": Measure(
        label="weighted F1", unit=SHARE, higher_is_better=True, lowest=0, highest=1
    ),
}
"""The measures of classification tasks without a trainer of their own."""

TRAINING: Final = "training_"
"""Prefix to the name of a measure that was taken during the round's trainings."""


class MeasuredModel(StrEnum):
    """A model that clients measure. Its value is the prefix of the measures' names."""

    ROUND = ""
    """The round's model."""
    TUNED = "tuned_"
    """The round's model after the client has trained it further."""
    PERSONAL = "personal_"
    """The client's own model, or the round's model if the client has none yet."""


def of_model(measures: Mapping[str, Measure], model: MeasuredModel) -> dict[str, Measure]:
    """Return the measures with their names and labels for this model."""
    return {
        f"{model}{name}": replace(each, label=f"{model.rstrip('_')} {each.label}".strip())
        for name, each in measures.items()
    }


_RESERVED: Final = (TRAINING, MeasuredModel.TUNED, MeasuredModel.PERSONAL)
MOST_MEASURES: Final = 16
MOST_COUNTED: Final = 2**40
"""Maximum number of samples in one evaluation. A larger number is not plausible, and sums must stay
exact."""
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST_NAME: Final = 40
_LONGEST_LABEL: Final = 40


@dataclass(frozen=True, kw_only=True)
class MeasureSums:
    """Measures of one client, or the sum of several clients' measures, by declared name."""

    measures: Measures

    def __add__(self, other: MeasureSums) -> MeasureSums:
        """Return the sum. Counts are exact; sums are rounded, so add in a fixed order."""
        names = [*self.measures, *(name for name in other.measures if name not in self.measures)]
        nothing = Measured(0.0, 0)
        added = {}
        for name in names:
            a, b = self.measures.get(name, nothing), other.measures.get(name, nothing)
            added[name] = Measured(a.sum + b.sum, a.count + b.count)
        return MeasureSums(measures=added)

    @property
    def counted(self) -> dict[str, int]:
        """Number of samples from which each measure was computed, by the measure's name."""
        return {name: each.count for name, each in self.measures.items()}

    @property
    def samples(self) -> int:
        """Number of samples of the measure that was computed from the most; 0 without measures."""
        return max(self.counted.values(), default=0)

    def means(self) -> dict[str, float]:
        """Return the mean of each measure that has a count above 0."""
        return {name: each.mean for name, each in self.measures.items() if each.count}


def own_trainer(task: Task, name: str) -> Trainer | None:
    """Return the task's own trainer, or None for a classification task.

    name: the task's name. Raises ConfigurationError if the task has neither classes nor a trainer,
    or if the trainer's declarations are invalid.
    """
    trainer = task.trainer()
    whose = f"task '{name}'"
    if trainer is None:
        if task.classes < 1:
            raise ConfigurationError(
                f"{whose} has neither classes nor a trainer; give the task `classes`, or a "
                "method `trainer` that returns a trainer"
            )
        return None
    if not isinstance(trainer, Trainer):
        raise ConfigurationError(
            f"{whose}: its trainer is of the class {type(trainer).__name__}; derive this class "
            "from potluck.common.trainer.Trainer"
        )
    _check_declarations(getattr(trainer, "measures", {}), whose)
    for capability, missing, remedy in (
        (Capability.LABEL_COUNTS, task.classes < 1, "`classes` to the task"),
        (Capability.LOSS, "loss" not in trainer.measures, "a measure called 'loss' to the trainer"),
    ):
        if capability in trainer.capabilities and missing:
            raise ConfigurationError(
                f"{whose}: its trainer declares the capability '{capability}', but a part that "
                f"the capability needs is missing; add {remedy}"
            )
    return trainer


def _check_declarations(measures: Mapping[str, Measure], whose: str) -> None:
    if not 1 <= len(measures) <= MOST_MEASURES:
        raise ConfigurationError(
            f"{whose}: its trainer declares {len(measures)} measures; declare from 1 to "
            f"{MOST_MEASURES}"
        )
    for name, measure in measures.items():
        sound = _NAME.fullmatch(name) and len(name) <= _LONGEST_NAME
        if not sound or name.startswith(_RESERVED):
            raise ConfigurationError(
                f"{whose}: {name[:80]!r} is not a valid name of a measure; use lower-case words "
                f"joined by underscores, up to {_LONGEST_NAME} characters, which don't start with "
                f"{' or '.join(map(repr, map(str, _RESERVED)))}"
            )
        if not isinstance(measure, Measure) or not measure.lowest < measure.highest:
            raise ConfigurationError(
                f"{whose}: measure '{name}' must be declared as a Measure with lowest < highest"
            )
        if len(measure.label) > _LONGEST_LABEL or len(measure.unit) > _LONGEST_LABEL:
            raise ConfigurationError(
                f"{whose}: the label or the unit of measure '{name}' is too long; shorten it to "
                f"{_LONGEST_LABEL} characters"
            )
        known = CLASSIFICATION.get(name)
        if known is not None and known.unit == SHARE and measure.unit != SHARE:
            raise ConfigurationError(
                f"{whose}: the name '{name}' is reserved for a measure with the unit {SHARE!r}; "
                "set this unit, or rename the measure"
            )


def checked_measures(
    found: Mapping[str, Measured], declared: Mapping[str, Measure], whose: str
) -> Measures:
    """Check measures and return them in the declared order. whose: owner of the measures, named in
    errors.

    Raises TrainerError for an undeclared name, or a value that the measure can't have.
    """
    unknown = sorted(set(found) - set(declared))
    if unknown:
        raise TrainerError(
            f"{whose} has the measure {unknown[0][:80]!r}, which the task's trainer does not "
            f"declare; declared measures: {', '.join(declared)}"
        )
    return {
        name: _checked(name, found[name], declared[name], whose)
        for name in declared
        if name in found
    }


def _checked(name: str, value: Measured, measure: Measure, whose: str) -> Measured:
    try:
        total, count = float(value.sum), operator.index(value.count)
    except (AttributeError, TypeError, ValueError, OverflowError):
        total, count = math.nan, -1
    if not 0 <= count <= MOST_COUNTED:
        raise TrainerError(
            f"{whose} has the value {str(value)[:80]} for measure '{name}'; the value must be "
            f"Measured(sum, count) with a whole count from 0 to {MOST_COUNTED}"
        )
    if not math.isfinite(total) or (count == 0 and total != 0):
        raise TrainerError(
            f"{whose} has the sum {total} and the count {count} for measure '{name}', but the sum "
            "must be finite, and 0 if the count is 0; check the data for missing or huge values, "
            "and the trainer's code"
        )
    slack = 1e-9 * max(1.0, abs(measure.lowest), abs(measure.highest))
    if count and not measure.lowest - slack <= total / count <= measure.highest + slack:
        raise TrainerError(
            f"{whose} has the mean {total / count:g} for measure '{name}'; the trainer declares "
            f"that this measure is from {measure.lowest:g} to {measure.highest:g}"
        )
    return Measured(total, count)


def shown_measures(declared: Mapping[str, Measure]) -> dict[str, Measure]:
    """Return all measures that rounds may have. Those that are taken during the rounds' trainings
    come last."""
    trained = {
        f"{TRAINING}{name}": Measure(
            label=f"training {each.label}",
            unit=each.unit,
            higher_is_better=each.higher_is_better,
        )
        for name, each in declared.items()
    }
    return {**declared, **trained}


def added_up(sums: Iterable[MeasureSums]) -> MeasureSums:
    """Return the sum of all measures, added in this order."""
    total = MeasureSums(measures={})
    for each in sums:
        total += each
    return total
