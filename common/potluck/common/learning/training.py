"""A run's settings of local training: choices in the run file replace the task's
recommendations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from potluck.common.settings.configuration import validate
from potluck.common.settings.local_training import LocalTraining

if TYPE_CHECKING:
    from potluck.common.task import Task


def training_for(task: Task, chosen: Mapping[str, object], *, source: str) -> LocalTraining:
    """Return the run's settings: for each, the chosen value, else the task's recommendation, else
    the default.

    A task's recommendations are its attribute `training`, a mapping. source: name of `chosen` in
    errors. Raises ConfigurationError for an unknown setting or a value out of range.
    """
    name = f"'training' of {type(task).__name__}"
    return validate(
        LocalTraining,
        validate(LocalTraining, task.training, source=name).model_dump(exclude_unset=True)
        | validate(LocalTraining, chosen, source=source).model_dump(exclude_unset=True),
        source=source,
    )
