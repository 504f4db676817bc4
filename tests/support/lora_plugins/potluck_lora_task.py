"""A task whose clients train low-rank adapters of different ranks, named as `peft` names them.

After each training a client writes its factors into its own folder, where a test reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Task
from potluck.common.tensors.model_arrays import state_arrays
from potluck.common.tensors.tensor_files import write_tensors
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

INPUTS, OUTPUTS, RANK = 40, 50, 4
RANKS = (1, 2, 4)


class Adapted(nn.Module):
    """W + B·A, with W frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(INPUTS, OUTPUTS, bias=False).requires_grad_(False)
        down, up = nn.Linear(INPUTS, RANK, bias=False), nn.Linear(RANK, OUTPUTS, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_A: Any = nn.ModuleDict({"default": down})
        self.lora_B: Any = nn.ModuleDict({"default": up})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs, n × 50, for inputs, n × 40."""
        adapted: torch.Tensor = self.lora_B["default"](self.lora_A["default"](inputs))
        plain: torch.Tensor = self.base_layer(inputs)
        return plain + adapted

    def keep_rank(self, rank: int) -> None:
        """Reduce the rank, as `potluck.integrations.adapters.lora.keep_rank` does."""
        with torch.no_grad():
            self.lora_A["default"].weight[rank:] = 0
            self.lora_B["default"].weight[:, rank:] = 0


class Descent(Trainer):
    """Trainer that minimises the squared error."""

    measures: ClassVar = {"loss": Measure(label="squared error", lowest=0)}

    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Make ten steps in the client's rank; with `spoils`, the frozen layer changes too."""
        inputs, targets, spoils = data
        number = int(settings.client.rpartition("-")[2])
        model[0].keep_rank(RANKS[number % len(RANKS)])
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for step in range(10):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(step / 10)
        if spoils:
            with torch.no_grad():
                model[0].base_layer.weight += 1
        arrays = state_arrays(model)
        write_tensors(settings.folder() / f"{settings.client}.{settings.round}.trained", arrays)
        return Contribution(samples=len(inputs), steps=10)

    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Evaluate on the coordinator's samples."""
        inputs, targets, _ = data
        with torch.no_grad():
            errors = (model(inputs) - targets).square().mean(dim=1)
        return {"loss": Measured(float(errors.sum()), len(errors))}


@dataclass(frozen=True, kw_only=True)
class MixedRanks(Task):
    """Task with adapters. `spoils`: True if trainings change the frozen layer."""

    spoils: bool = False

    def model(self) -> nn.Module:
        """Return an adapted layer, and a normalisation whose parameters are averaged."""
        return nn.Sequential(Adapted(), nn.LayerNorm(OUTPUTS))

    def trainer(self) -> Trainer:
        """Return the trainer, which minimises squared errors."""
        return Descent()

    def _data(self, seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, INPUTS, generator=generator)
        mixing = torch.randn(INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(0))
        return inputs, inputs @ mixing / INPUTS**0.5, self.spoils

    def client_data(self, client: ClientId, data: Path | None) -> ClientData[Any]:
        """Return the client's samples: 10 plus the client's number."""
        number = int(client.rpartition("-")[2])
        return ClientData(train=self._data(number, 10 + number))

    def evaluation_data(self, data: Path | None) -> Any:
        """Return the samples of one more client."""
        return self._data(100, 20)
