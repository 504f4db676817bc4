"""Evaluates a model on labelled samples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from potluck.common.errors import TrainingError
from potluck.common.interruptible import interruption
from potluck.common.learning.scores import EvaluationCounts
from potluck.common.task import Examples


def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    classes: int,
    groups: int,
    device: torch.device,
    batch_size: int = 1024,
) -> EvaluationCounts:
    """Return counts over all samples. The model is moved to `device` and left in evaluation mode.

    The loss is cross-entropy, even if the clients train with another loss. If a sample has a NaN
    logit, that logit's class is the prediction, and the loss is infinite. Deterministic for the
    same batch size and number of threads. Raises TrainingError if the model's output is not n ×
    `classes`, or labels or groups are out of range.
    """
    _check_ranges(examples, classes, groups)
    model.to(device).eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    predictions: list[torch.Tensor] = []
    check = interruption()
    with torch.inference_mode():
        for start in range(0, len(examples), batch_size):
            check()
            end = min(start + batch_size, len(examples))
            positions = torch.arange(start, end, device=examples.labels.device)
            inputs = examples.inputs_at(positions).to(device)
            labels = examples.labels[start:end].to(device)
            logits = model(inputs)
            if logits.shape != (len(labels), classes):
                raise TrainingError(
                    f"the model's output has shape {tuple(logits.shape)} for {len(labels)} "
                    f"samples, expected {(len(labels), classes)}; correct the task's model or "
                    "classes"
                )
            loss_sum += functional.cross_entropy(logits.double(), labels, reduction="sum")
            predictions.append(logits.argmax(dim=1))
    predicted = torch.cat(predictions).cpu() if predictions else torch.zeros(0, dtype=torch.int64)
    return _count(float(loss_sum), predicted, examples, classes, groups)


def _count(
    loss_sum: float, predicted: torch.Tensor, examples: Examples, classes: int, groups: int
) -> EvaluationCounts:
    labels = examples.labels.cpu()
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2)
    zero = EvaluationCounts.zero(classes, groups)
    group_samples, group_correct = zero.group_samples, zero.group_correct
    if groups and examples.groups is not None:
        members = examples.groups.cpu()
        group_samples = torch.bincount(members, minlength=groups).numpy()
        group_correct = torch.bincount(members[predicted == labels], minlength=groups).numpy()
    return EvaluationCounts(
        loss_sum=loss_sum if math.isfinite(loss_sum) else math.inf,
        confusion=confusion.numpy().reshape(classes, classes).astype(np.int64),
        group_samples=group_samples.astype(np.int64),
        group_correct=group_correct.astype(np.int64),
    )


def _check_ranges(examples: Examples, classes: int, groups: int) -> None:
    checks = [("labels", examples.labels, classes)]
    if groups and examples.groups is not None:
        checks.append(("groups", examples.groups, groups))
    for name, values, limit in checks:
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit:
            raise TrainingError(
                f"the task's {name} are in [{int(values.min())}, {int(values.max())}], expected "
                f"[0, {limit - 1}]; correct the task's {name}"
            )
