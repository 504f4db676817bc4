"""A task that stops or kills its process at a point that a test has named."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from potluck_crash_boundaries import watch
from potluck_crash_points import reach
from torch import Tensor, nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples

watch(reach)


class _Network(nn.Module):
    """A small classifier, and an unused parameter that sets the size of the model's file."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.rand(parameters))
        self.classifier = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            reach("forward")
        outputs: Tensor = self.classifier(inputs)
        return outputs


class _EvaluatedOn(Examples):
    """Evaluation samples; reading them reaches the point `evaluate`."""

    def inputs_at(self, positions: Tensor) -> Tensor:
        reach("evaluate")
        return super().inputs_at(positions)


@dataclass(frozen=True, kw_only=True)
class Watched(Examples):
    """Training samples; moving them to the device reaches the point `point`."""

    point: str

    def to(self, device: torch.device) -> Examples:
        reach(self.point)
        return super().to(device)

    def subset(self, positions: Tensor) -> Examples:
        """Return a subset that reaches the same kill point."""
        some = super().subset(positions)
        return replace(self, inputs=some.inputs, labels=some.labels, groups=some.groups)


def _examples(seed: int, samples: int = 32) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(samples, 4, generator=generator)
    return Examples(inputs=inputs, labels=inputs[:, :3].argmax(1))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Three classes; every client has its own 32 samples.

    Points: `train-CLIENT` on hosts, `evaluate` on the coordinator, `forward` in the process that
    evaluates the model. parameters: number of unused parameters. central: True if the coordinator
    evaluates, False for the clients. unequal: True to give each client four times the samples of
    the previous one. layered: True for a model of consecutive layers, which batched steps need.
    """

    parameters: int = 1000
    central: bool = True
    unequal: bool = False
    layered: bool = False

    classes = 3
    groups = 0

    def model(self) -> nn.Module:
        """Return the classifier with the unused parameter, or without it if `layered`."""
        if self.layered:
            return nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 3))
        extra = int(
            os.environ.get("POTLUCK_EXTRA_PARAMETERS", "0")
        )  # set to simulate another release of the task
        return _Network(self.parameters + extra)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return samples seeded by the number at the end of the client's id."""
        number = int(client.rpartition("-")[2])
        train = _examples(number, 32 * 4**number if self.unequal else 32)
        return ClientData(
            train=Watched(point=f"train-{client}", inputs=train.inputs, labels=train.labels),
            held_out=None if self.central else _examples(1000 + number),
        )

    def evaluation_data(self, data: Path | None) -> Examples | None:
        """Return samples that belong to no client; None if the coordinator doesn't evaluate."""
        if not self.central:
            return None
        examples = _examples(999)
        return _EvaluatedOn(inputs=examples.inputs, labels=examples.labels)

    def public_data(self, data: Path | None) -> Tensor | None:
        """Return inputs of samples that belong to no client."""
        return _examples(998).inputs
