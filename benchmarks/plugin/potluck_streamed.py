"""The task of `streamed_data.py`: samples in a file on the host's disk, of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from potluck.common.errors import ConfigurationError
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

WIDTH = 1023
"""Number of inputs of a sample; with its target, a sample takes 4 KiB."""
_BATCH = 4096


def batches(path: Path) -> Iterator[torch.Tensor]:
    """Yield the batches of a file, b × (inputs and target), float32; only one is in memory."""
    with path.open("rb", buffering=0) as file:
        while content := file.read(_BATCH * 4 * (WIDTH + 1)):
            yield torch.from_numpy(np.frombuffer(bytearray(content), np.float32)).view(
                -1, WIDTH + 1
            )


class Streaming(Trainer):
    """Trains by least squares, in one pass over the file."""

    measures: ClassVar = {"loss": Measure(label="squared error", lowest=0)}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Take one step per batch of the file."""
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
        total, samples, steps = 0.0, 0, 0
        for batch in batches(data):
            loss = functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            samples, steps = samples + len(batch), steps + 1
            total += loss.item() * len(batch)
            report(samples * 4 * (WIDTH + 1) / data.stat().st_size)
        return Contribution(
            samples=samples, steps=steps, measures={"loss": Measured(total, samples)}
        )

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Return the metrics of the file's first batch."""
        batch = next(batches(data))
        with torch.no_grad():
            loss = functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])
        return {"loss": Measured(loss.item() * len(batch), len(batch))}


@dataclass(frozen=True, kw_only=True)
class Streamed(Task):
    """The task: `samples.bin` in the host's data directory."""

    training: ClassVar = {"learning_rate": 1e-4}

    def model(self) -> nn.Module:
        """Return a linear model."""
        return nn.Linear(WIDTH, 1)

    def trainer(self) -> Trainer:
        """Return the trainer, which reads the file while it trains."""
        return Streaming()

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Path]:
        """Return just the file's path; the trainer reads the samples."""
        if data is None:
            raise ConfigurationError("set data_directory to the folder of samples.bin")
        return ClientData(train=data / "samples.bin", held_out=data / "samples.bin")

    def evaluation_data(self, data: Path | None) -> None:
        """Return None: the clients evaluate."""
