"""A task whose clients have sample counts that can't occur by chance in a run's output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from potluck.common.names import ClientId
from potluck.common.task import ClientData, Examples

BASE = (6133, 7919, 5417)


def label_counts(client: int) -> tuple[int, ...]:
    """Return a client's number of samples of each class."""
    return tuple(count + 101 * client + 7 * label for label, count in enumerate(BASE))


def _examples(counts: tuple[int, ...], seed: int) -> Examples:
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.eye(3)[labels] + 0.3 * torch.rand(len(labels), 3, generator=generator)
    return Examples(inputs=inputs, labels=labels, groups=labels % 2)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Three classes, two attributes."""

    classes = 3
    groups = 2

    def model(self) -> nn.Module:
        """Return a small model with random weights."""
        return nn.Linear(3, 3)

    def client_data(self, client: ClientId, data: Path | None) -> ClientData:
        """Return the samples that `label_counts` counts."""
        number = int(client.rpartition("-")[2])
        return ClientData(train=_examples(label_counts(number), number))

    def evaluation_data(self, data: Path | None) -> Examples:
        """Return samples that belong to no client."""
        return _examples((50, 50, 50), 99)
