"""A task that moves a model of a given size and trains next to nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples


class _Network(nn.Module):
    """A tiny classifier beside a parameter that takes no part in it."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.rand(max(1, parameters - 6)) * 0.1)
        self.classifier = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(inputs)
        return outputs


class Ballast:
    """Two classes, two features, so many parameters."""

    classes = 2
    groups = 0

    def __init__(self, parameters: int = 1000) -> None:
        self.parameters = parameters

    def model(self) -> nn.Module:
        """The network."""
        return _Network(self.parameters)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Two samples."""
        inputs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        return ClientData(train=Examples(inputs=inputs, labels=torch.tensor([0, 1])))

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """None."""
        return None
