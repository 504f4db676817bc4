"""Tasks whose model has a given size and whose training takes almost no time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples


class _Network(nn.Module):
    """A tiny classifier, and a large parameter that it does not use."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.rand(max(1, parameters - 6)) * 0.1)
        self.classifier = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(inputs)
        return outputs


class Ballast:
    """Task with two classes, two features and `parameters` parameters."""

    classes = 2
    groups = 0

    def __init__(self, parameters: int = 1000) -> None:
        self.parameters = parameters

    def model(self) -> nn.Module:
        """Return the network."""
        return _Network(self.parameters)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return two samples."""
        return ClientData(train=_two_samples())

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return None: the coordinator evaluates nothing."""
        return None


class _Shifted(nn.Module):
    """A tiny classifier, and a large parameter whose every value changes by noise in each step."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        size = max(1, parameters - 6)
        self.ballast = nn.Parameter(torch.rand(size) * 0.1)
        self.classifier = nn.Linear(2, 2)
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.2
        self.register_buffer("noise", noise, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(inputs)
        shift = torch.dot(self.ballast, self.get_buffer("noise"))
        return outputs + torch.stack([shift, torch.zeros_like(shift)])


class Shifted(Ballast):
    """Like `Ballast`, but a step of SGD with a learning rate of 0.1 changes every parameter, by
    about 0.01: no value of an update is zero."""

    def model(self) -> nn.Module:
        """Return the network."""
        return _Shifted(self.parameters)


class _Deep(nn.Module):
    """A tiny classifier, and many parameter tensors of equal size that all get a gradient."""

    def __init__(self, parameters: int, tensors: int) -> None:
        super().__init__()
        size = max(1, parameters // tensors)
        self.layers = nn.ParameterList(torch.rand(size).mul_(0.1) for _ in range(tensors))
        self.classifier = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(inputs)
        for layer in self.layers:
            outputs = outputs + layer.mean()
        return outputs


class Deep:
    """Like `Ballast`, with `tensors` tensors, all of them trained; the coordinator evaluates it."""

    classes = 2
    groups = 0

    def __init__(self, parameters: int = 1000, tensors: int = 10) -> None:
        self.parameters, self.tensors = parameters, tensors

    def model(self) -> nn.Module:
        """Return the network."""
        return _Deep(self.parameters, self.tensors)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return two samples."""
        return ClientData(train=_two_samples())

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return the same two examples as `client_data`."""
        return _two_samples()


class _Frozen(nn.Module):
    """A tiny classifier, and tensors of zeros that are not trained."""

    def __init__(self, parameters: int, tensors: int) -> None:
        super().__init__()
        size = max(1, parameters // tensors)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.zeros(size), requires_grad=False) for _ in range(tensors)
        )
        self.classifier = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(inputs)
        return outputs


class Sparse(Ballast):
    """Like `Ballast`, with `tensors` tensors of zeros: its sparse files take little space."""

    def __init__(self, parameters: int = 1000, tensors: int = 10) -> None:
        super().__init__(parameters)
        self.tensors = tensors

    def model(self) -> nn.Module:
        """Return the network."""
        return _Frozen(self.parameters, self.tensors)


def _two_samples() -> Examples:
    inputs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    return Examples(inputs=inputs, labels=torch.tensor([0, 1]))
