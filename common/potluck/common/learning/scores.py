"""Exact counts of an evaluation, and the metrics computed from them.

Counts of different clients can be added, so metrics over clients equal the metrics over all their
samples. Samples stay with their clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import ProtocolError

_MOST_SAMPLES = 2**40
"""Maximum number of samples in one evaluation. A larger number is not plausible, and sums must stay
within int64."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of a model on some samples. A metric that is undefined is None.

    loss: mean cross-entropy; None without samples, or if infinite. accuracy: share of correct
    predictions, in [0, 1]. worst_group_accuracy: the lowest accuracy among the groups that have
    samples; None without groups. weighted_f1: F1 score averaged over classes, weighted by the
    classes' samples; 0 for a class that is neither among the labels nor predicted.
    """

    loss: float | None
    accuracy: float | None
    worst_group_accuracy: float | None
    weighted_f1: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationCounts:
    """Counts of one evaluation, or a sum of several evaluations.

    loss_sum: sum of the loss over the samples, ≥ 0; infinite if a sample's loss is not finite.
    confusion: C × C, int64, true class × predicted class. group_samples, group_correct: G, int64,
    number of samples, and of correctly classified samples, in each group; both exclude samples of
    unknown group.
    """

    loss_sum: float
    confusion: NDArray[np.int64]
    group_samples: NDArray[np.int64]
    group_correct: NDArray[np.int64]

    @classmethod
    def zero(cls, classes: int, groups: int) -> EvaluationCounts:
        """Return counts for zero samples."""
        return cls(
            loss_sum=0.0,
            confusion=np.zeros((classes, classes), dtype=np.int64),
            group_samples=np.zeros(groups, dtype=np.int64),
            group_correct=np.zeros(groups, dtype=np.int64),
        )

    @classmethod
    def received(
        cls,
        *,
        loss_sum: float,
        confusion: Sequence[int],
        group_samples: Sequence[int],
        group_correct: Sequence[int],
        classes: int,
        groups: int,
    ) -> EvaluationCounts:
        """Return counts from the numbers that a peer sent. confusion: its elements, row by row.

        Raises ProtocolError for numbers that an evaluation of this task can't give.
        """
        _require(len(confusion) == classes**2, "confusion", len(confusion), f"{classes}² entries")
        for name, values in (("group_samples", group_samples), ("group_correct", group_correct)):
            _require(len(values) == groups, name, len(values), f"{groups} entries")
        _require(loss_sum >= 0, "loss_sum", loss_sum, "a number ≥ 0")  # also refuses NaN
        for name, values in (("confusion", confusion), ("group_samples", group_samples)):
            _require(min(values, default=0) >= 0, name, min(values, default=0), "no entry below 0")
            _require(sum(values) <= _MOST_SAMPLES, name, sum(values), f"≤ {_MOST_SAMPLES} samples")
        _require(
            all(0 <= c <= n for c, n in zip(group_correct, group_samples, strict=True)),
            "group_correct",
            "a group",
            "at most as many correct samples as samples",
        )
        counts = cls(
            loss_sum=float(loss_sum),
            confusion=np.array(confusion, dtype=np.int64).reshape(classes, classes),
            group_samples=np.array(group_samples, dtype=np.int64),
            group_correct=np.array(group_correct, dtype=np.int64),
        )
        counts._require_consistent()
        return counts

    def _require_consistent(self) -> None:
        grouped, unknown = int(self.group_samples.sum()), self.samples
        unknown -= grouped
        _require(
            unknown >= 0, "group_samples", grouped, f"at most {self.samples} samples in all groups"
        )
        ungrouped_correct = self.correct - int(self.group_correct.sum())
        _require(
            0 <= ungrouped_correct <= unknown,
            "group_correct",
            int(self.group_correct.sum()),
            f"a number that is consistent with the confusion matrix ({self.correct} correct "
            "samples)",
        )

    def __add__(self, other: EvaluationCounts) -> EvaluationCounts:
        """Return the sum. Integers are exact; the loss is rounded, so add in a fixed order."""
        return EvaluationCounts(
            loss_sum=self.loss_sum + other.loss_sum,
            confusion=self.confusion + other.confusion,
            group_samples=self.group_samples + other.group_samples,
            group_correct=self.group_correct + other.group_correct,
        )

    @property
    def samples(self) -> int:
        """Number of samples evaluated."""
        return int(self.confusion.sum())

    @property
    def counted(self) -> dict[str, int]:
        """Number of samples from which each metric is computed, by the metric's name."""
        of_groups = int(self.group_samples.sum())
        return {
            field.name: of_groups if field.name == "worst_group_accuracy" else self.samples
            for field in fields(Metrics)
        }

    @property
    def correct(self) -> int:
        """Number of samples classified correctly."""
        return int(np.trace(self.confusion))

    def metrics(self) -> Metrics:
        """Return the metrics that these counts give."""
        samples = self.samples
        if samples == 0:
            return Metrics(loss=None, accuracy=None, worst_group_accuracy=None, weighted_f1=None)
        return Metrics(
            loss=self.loss_sum / samples if math.isfinite(self.loss_sum) else None,
            accuracy=self.correct / samples,
            worst_group_accuracy=self._worst_group(),
            weighted_f1=self._weighted_f1(),
        )

    def means(self) -> dict[str, float]:
        """Return the metrics that are defined, by name."""
        return {name: value for name, value in vars(self.metrics()).items() if value is not None}

    def _worst_group(self) -> float | None:
        known = self.group_samples > 0
        if not known.any():
            return None
        return float((self.group_correct[known] / self.group_samples[known]).min())

    def _weighted_f1(self) -> float:
        true, predicted = self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        both = np.maximum(true + predicted, 1)  # avoids 0 / 0: the F1 of such a class is 0
        scores = 2 * np.diagonal(self.confusion) / both
        return float((scores * true).sum() / self.samples)


def _require(condition: bool, field: str, value: object, expected: str) -> None:
    if not condition:
        raise ProtocolError(
            f"evaluation counts: {field} has {value}, expected {expected}; check that the "
            "client has the same task as the run",
            field=field,
            value=value,
        )
