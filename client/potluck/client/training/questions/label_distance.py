"""The question `label-distance`, a step of DC selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.client.question import Question, QuestionContext
from potluck.common.errors import ConfigurationError
from potluck.common.learning.step_by_step import LABEL_DISTANCE


class LabelDistance(Question):
    """Answers `label-distance`: how far a cohort's labels are from a target if the client joins.

    The distance is 1 − cos(V + active, target). V: the client's own label counts.

    As in the DC procedure of Düsing and Cimiano §3. active: label counts of the clients selected so
    far. target: the desired label counts. Both have an integer per class, separated by spaces. The
    answer has no noise and discloses the client's counts: hosts answer only if their owner allows
    `unsafe-stepwise` sums.
    """

    def __init__(self, *, active: str, target: str) -> None:
        self._active = _numbers("active", active)
        self._target = _numbers("target", target)

    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Compute the distance from the training samples.

        Raises ConfigurationError for a wrong number of classes.
        """
        for name, values in (("active", self._active), ("target", self._target)):
            if len(values) != context.classes:
                raise ConfigurationError(
                    f"{LABEL_DISTANCE}: '{name}' has {len(values)} numbers, but the task has "
                    f"{context.classes} classes"
                )
        counts = np.array(_label_counts(context), np.float64)
        return {LABEL_DISTANCE: _distance(counts + self._active, np.array(self._target))}


def _label_counts(context: QuestionContext) -> list[int]:
    if context.own is not None:
        return context.own.label_counts()
    from potluck.common.learning.sample_counts import label_counts  # imports torch

    return label_counts(context.data.train, context.classes)


def _distance(counts: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    norms = float(np.linalg.norm(counts) * np.linalg.norm(target))
    return 1.0 - float(counts @ target) / norms if norms > 0 else 1.0


def _numbers(name: str, text: object) -> Sequence[float]:
    try:
        numbers = [int(word) for word in text.split()] if isinstance(text, str) else []
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number < 1 << 53 for number in numbers):
        raise ConfigurationError(
            f"{LABEL_DISTANCE}: '{name}' is {str(text)[:80]!r}; give a whole number ≥ 0 for each "
            "class, separated by spaces",
            option=name,
        )
    return [float(number) for number in numbers]
