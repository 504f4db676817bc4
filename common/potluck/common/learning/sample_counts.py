"""Signals computed from a client's training samples, before noise is added. Pure functions."""

from __future__ import annotations

import torch

from potluck.common.errors import TrainingError
from potluck.common.task import Examples


def label_counts(examples: Examples, classes: int) -> list[int]:
    """Return the number of samples of each class. Raises TrainingError if a label is out of
    range."""
    counts = torch.bincount(_in_range(examples.labels, classes, "labels"), minlength=classes)
    return [int(count) for count in counts]


def interaction_matrix(examples: Examples, classes: int, groups: int) -> list[list[int]]:
    """Return the numbers of samples by class and binary attribute: classes × 2."""
    if groups != 2 * classes or examples.groups is None:
        raise TrainingError(
            "the task has no attributes: its groups must be class × 2 + attribute; choose a "
            "selector that needs no interaction matrix",
            groups=groups,
        )
    members = _in_range(examples.groups, groups, "groups")
    if not torch.equal(members // 2, examples.labels.cpu()):
        raise TrainingError(
            "the task's groups are not class × 2 + attribute; choose a selector that needs no "
            "interaction matrix"
        )
    counts = torch.bincount(members, minlength=groups).reshape(classes, 2)
    return [[int(count) for count in row] for row in counts]


def _in_range(values: torch.Tensor, limit: int, name: str) -> torch.Tensor:
    values = values.cpu()
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise TrainingError(
            f"the task's {name} are in [{int(values.min())}, {int(values.max())}], expected "
            f"[0, {limit - 1}]; correct the task's {name}"
        )
    return values
