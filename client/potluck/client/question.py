"""The seam for questions: what a coordinator asks clients before it selects.

A kind of question is one class, derived from `Question` and registered in the entry-point group
`potluck.questions`. Its constructor takes the question's parameters as keyword arguments and only
stores them; their annotations say what they may be. A few numbers answer it, computed anew whenever
it is asked; what clients disclose once is a profile instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from potluck.common.errors import TrainingError
from potluck.common.names import ClientId
from potluck.common.settings.plugins import QUESTIONS, Plugin
from potluck.common.task import ClientData

if TYPE_CHECKING:  # a host whose tasks bring their own trainers need not have torch
    import torch


LocalUpdate = Mapping[str, NDArray[np.float32]]
"""The way of each tensor of parameters in a training; names are the model's."""


@dataclass(frozen=True, kw_only=True)
class OwnAnswers:
    """What the trainer of a task can say of a client; each raises TrainingError where it can't.

    mean_loss: of the round's model over the training samples. label_counts: of these.
    gradient_norm: of the mean loss over them, at the round's model.
    """

    mean_loss: Callable[[], float]
    label_counts: Callable[[], list[int]]
    gradient_norm: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class QuestionContext:
    """The facts that an answer is computed from.

    client: the one asked. round: from 1, the one whose cohort is being chosen. data: the client's,
    `Examples` unless the task has a trainer. classes, groups: the task's. model: the round's, with
    its weights, not yet on `device`; None for a kind that needs none. cancelled: tells that the
    answer is no longer wanted. validation_share: of the samples that are kept back from training.
    pace: simulated seconds of a training per sample, on a virtual clock; 0 on a real one. own: what
    the task's trainer can say; None for a classification task. local_update: trains as the run does
    and returns how far each parameter moved, float32 by tensor; nothing of that training is kept,
    and the model is another one after it. None unless the coordinator said how the run trains.
    available: the chance that the client is there, by its owner's plan, from so many seconds from
    now to so many.
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
        """Raise TrainingError where the task has a trainer, which can't answer such a question."""
        if self.own is not None:
            raise TrainingError(
                f"question '{kind}' is about the samples of classification tasks, and this task "
                "trains by itself; choose another selector"
            )


class Question(Plugin):
    """A kind of question. Called from a worker thread; may take its time."""

    group = QUESTIONS

    needs_model: bool = False
    """Whether the round's model is fetched first; a training that follows finds it there."""

    @abstractmethod
    def answer(self, context: QuestionContext) -> Mapping[str, float]:
        """Numbers by name. The same question of the same data and model has the same answer.

        Raises TrainingError where there is none; the coordinator then selects without it.
        """
