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
"""The client for which a module is imported."""


class _Importing(Trainer):
    """Trainer whose step size comes from the imported module."""

    measures: ClassVar = {"mean": Measure(label="mean")}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """One step."""
        global importing
        importing = settings.client
        import potluck_crash_imported

        model["mean"] += potluck_crash_imported.STEP * (data - model["mean"])
        return Contribution(samples=1, steps=1)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """The mean."""
        return {"mean": Measured(float(model["mean"]), 1)}


class Importing(Task):
    """The mean of numbers. Points: `import-CLIENT`, while a host imports what its trainer needs."""

    def model(self) -> Any:
        """Zero."""
        return {"mean": np.zeros((), np.float32)}

    def trainer(self) -> Trainer:
        """Return the trainer that imports."""
        return _Importing()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[np.float32]:
        """The number at the end of the client's id."""
        number = np.float32(client.rpartition("-")[2])
        return ClientData(train=number, held_out=number)

    def evaluation_data(self, data: Path | None) -> None:
        """Return None: the clients evaluate."""
