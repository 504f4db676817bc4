"""Checks of a task's data before they are used."""

from __future__ import annotations

import torch

from potluck.common.errors import DataError
from potluck.common.task import ClientData, Examples
from potluck.common.tasks.stored import StoredExamples

_AT_ONCE = 4096


def check_client_data(data: ClientData, task: str, client: str) -> None:
    """Raise DataError unless every sample of a client has one label."""
    check_lengths(data.train, task, f"client '{client}'")
    if data.held_out is not None:
        check_lengths(data.held_out, task, f"the held-out data of client '{client}'")


def check_lengths(examples: Examples, task: str, whose: str) -> None:
    """Raise DataError unless every sample has one label and, if the task has groups, one group."""
    if isinstance(examples, StoredExamples):
        inputs = len(examples.stored.rows)
    else:
        inputs = len(examples.inputs)
    labels = len(examples.labels)
    groups = labels if examples.groups is None else len(examples.groups)
    if inputs == labels == groups:
        return
    found = f"{inputs} inputs and {labels} labels"
    if groups != labels:
        found = f"{inputs} inputs, {labels} labels and {groups} groups"
    raise DataError(
        f"{whose}: task '{task}' returned {found}; these numbers must be equal",
        task=task,
        inputs=inputs,
        labels=labels,
        groups=groups,
    )


def check_labels(examples: Examples, classes: int, whose: str) -> None:
    """Raise DataError if a label is outside of [0, classes). At least one sample is needed."""
    lowest, highest = (int(each) for each in examples.labels.aminmax())
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"the labels of {whose} are from {lowest} to {highest}, but the task has classes 0 to "
            f"{classes - 1}; correct the data",
            classes=classes,
        )


def check_finite(examples: Examples, whose: str) -> None:
    """Raise DataError if an input is NaN or infinite. Reads all inputs."""
    for begin in range(0, len(examples), _AT_ONCE):
        end = min(begin + _AT_ONCE, len(examples))
        inputs = examples.inputs_at(torch.arange(begin, end, device=examples.labels.device))
        if not inputs.is_floating_point():
            return
        bad = (~inputs.isfinite()).reshape(len(inputs), -1).any(dim=1).nonzero()
        if len(bad):
            raise DataError(
                f"the inputs of {whose} contain NaN or infinity, first in sample "
                f"{begin + int(bad[0])}; correct the data",
                sample=begin + int(bad[0]),
            )
