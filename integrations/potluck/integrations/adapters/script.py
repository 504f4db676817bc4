"""Makes a task of a script's functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.common.errors import ConfigurationError
from potluck.common.names import ClientId
from potluck.common.task import ClientData, Recommended, Task
from potluck.common.trainer import SHARE, Measure, Measured, Trainer

__all__ = ["Measure", "Measured", "script_task", "share"]  # the names that scripts import


def share(label: str) -> Measure:
    """Declare a metric with a mean in [0, 1], where higher is better, such as accuracy or Dice."""
    return Measure(label=label, unit=SHARE, higher_is_better=True, lowest=0, highest=1)


def script_task(
    *,
    model: Callable[[], Any],
    data: Callable[[ClientId, Path], tuple[Any, Any]],
    trainer: Trainer,
    evaluation_data: Callable[[Path | None], Any] = lambda _: None,
    training: Recommended | None = None,
) -> type[Task]:
    """Return a task class without options, to register in the group `potluck.tasks`.

    model: makes a new model. data: takes a client and its host's `data_directory`, and returns the
    client's training data and held-out data. trainer: trainer of all clients. evaluation_data:
    returns the coordinator's own samples; by default there are none. training: default values of a
    run's `[training]` table. A task with options must derive from `Task` instead.
    """
    recommended, load, load_evaluation = training or {}, data, evaluation_data

    class ScriptTask(Task):
        needs_data = True
        training = recommended

        def model(self) -> Any:
            return model()

        def client_data(self, client: ClientId, data: Path | None) -> ClientData[Any]:
            if data is None:
                raise ConfigurationError(
                    f"client '{client}' reads its data from files; set data_directory in the "
                    "configuration of its host"
                )
            train, held_out = load(client, data)
            return ClientData(train=train, held_out=held_out)

        def evaluation_data(self, data: Path | None) -> Any:
            return load_evaluation(data)

        def trainer(self) -> Trainer:
            return trainer

    return ScriptTask
