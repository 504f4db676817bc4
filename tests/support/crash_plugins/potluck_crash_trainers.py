"""A task with its own trainer. Its first training in a process imports a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.trainer import (
    Contribution,
    EvaluationSettings,
    Measure,
    Measured,
    Measures,
    Trainer,
    TrainerSettings,
    TrainingProgress,
)

importing = ""
"""Id of the client whose training is importing a module; empty if there is none."""


class _Importing(Trainer):
    """Trainer that takes its step size from the module that it imports."""

    measures: ClassVar = {"mean": Measure(label="mean")}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Take one step towards the mean of the client's numbers."""
        global importing
        importing = settings.client
        import potluck_crash_imported

        model["mean"] += potluck_crash_imported.STEP * (data - model["mean"])
        return Contribution(samples=1, steps=1)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Return the value of the model as its metric."""
        return {"mean": Measured(float(model["mean"]), 1)}


class Importing(Task):
    """Task to learn the mean of numbers. Points: `import-CLIENT`, while a host imports the module
    that its trainer needs."""

    def model(self) -> Any:
        """Return a model of one number, 0."""
        return {"mean": np.zeros((), np.float32)}

    def trainer(self) -> Trainer:
        """Return the trainer that imports."""
        return _Importing()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[np.float32]:
        """Return the client's data: the number at the end of its id."""
        number = np.float32(client.rpartition("-")[2])
        return ClientData(train=number, held_out=number)

    def evaluation_data(self, data: Path | None) -> None:
        """Return None: the clients evaluate."""
