"""The extension point for questions, which a coordinator asks clients before it selects.

A kind of question is one class, derived from `Question` and registered in the entry-point group
`potluck.questions`. Its constructor takes the question's parameters as keyword arguments and only
stores them; their annotations give the allowed types and values. The answer is a few numbers,
computed again each time the question is asked. A value that clients disclose only once is a
profile, not an answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import TrainingError
from potluck.common.names import ClientId
from potluck.common.settings.plugins import QUESTIONS, Plugin
from potluck.common.task import ClientData

if TYPE_CHECKING:  # torch is optional on hosts whose tasks have their own trainers
    import torch


LocalUpdate = Mapping[str, NDArray[np.float32]]
"""Change of each parameter tensor in a training, by the model's tensor names."""


@dataclass(frozen=True, kw_only=True)
class OwnAnswers:
    """Functions of a task's own trainer that compute answers; each raises TrainingError if it
    can't.

    mean_loss: mean loss of the round's model over the training samples. label_counts: number of
    training samples per class. gradient_norm: norm of the gradient of that mean loss, at the
    round's model.
    """

    mean_loss: Callable[[], float]
    label_counts: Callable[[], list[int]]
    gradient_norm: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class QuestionContext:
    """Inputs from which a question computes its answer.

    client: the client that is asked. round: number, from 1, of the round whose cohort is being
    chosen. data: the client's data, `Examples` unless the task has a trainer. classes, groups:
    number of the task's classes, and of its groups. model: the round's model with its weights, not
    yet on `device`; None for a kind that needs none. cancelled: returns True once the answer is no
    longer wanted. validation_share: share of the samples held back from training. pace: simulated
    seconds of a training per sample, on a virtual clock; 0 on a real one. own: answers of the
    task's trainer; None for a classification task. local_update: function that trains as the run
    does and returns each parameter's change, float32, by tensor. It stores nothing of that
    training, but changes the weights of `model`. None unless the coordinator sent the run's
    training settings. available: chance, by the owner's plan, that the client is available between
    two times, given in seconds from now.
    """

    client: ClientId
    round: int
    data: ClientData[Any]
    classes: int
    groups: int
    device: torch.device | str
    model: Any
    cancelled: Callable[[], bool] = lambda: False
    validation_share: float = 0.0
    pace: float = 0.0
    own: OwnAnswers | None = None
    local_update: Callable[[], LocalUpdate] | None = None
    available: Callable[[float, float], float] = lambda begin, end: 1.0  # noqa: ARG005

    def require_examples(self, kind: str) -> None:
        """Raise TrainingError if the task has its own trainer; it can't answer such a question."""
        if self.own is not None:
            raise TrainingError(
                f"question '{kind}' needs a classification task, but this task has its own "
                "trainer; choose another selector"
            )


@dataclass(frozen=True, kw_only=True)
class BoundedSums:
    """Sums that one record changes by a bounded amount; their means, with noise, are an answer.

    values: sum by name, each ≥ 0. sensitivity: > 0; adding or removing one record changes the
    vector of all values by at most this (L2 norm). public: further numbers of the answer, which
    depend on no record.
    """

    values: Mapping[str, float]
    sensitivity: float
    public: Mapping[str, float] = field(default_factory=dict)


class Question(Plugin):
    """Base class of a question that the coordinator asks clients.

    A worker thread calls the methods; they may block for long."""

    group = QUESTIONS

    needs_model: bool = False
    """True if the host must fetch the round's model first; a later training reuses the model."""
    hides_records: ClassVar[bool] = False
    """True if the class has `bounded_sums`, for noise. Runs with `[privacy]` refuse other
    questions.
    """

    @abstractmethod
    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Return numbers by name; the same data and model must give the same answer.

        Raises TrainingError if there is no answer; the coordinator then selects without it.
        """

    def bounded_sums(self, context: QuestionContext, clip: float) -> BoundedSums:
        """Return the sums whose noisy means are the answer in a run with `[privacy]`.

        clip: bound on the numbers of one record (L2 norm), > 0; larger ones are scaled down. A
        record at which the computation fails adds nothing, so that a failure reveals no record.
        Raises TrainingError if the answer fails for other reasons.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no noisy form")
