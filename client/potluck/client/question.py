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

import torch
from torch import nn

from potluck.common.names import ClientId
from potluck.common.settings.plugins import QUESTIONS, Plugin
from potluck.common.task import ClientData


@dataclass(frozen=True, kw_only=True)
class QuestionContext:
    """The facts that an answer is computed from.

    client: the one asked. round: from 1, the one whose cohort is being chosen. data: the client's.
    classes, groups: the task's. model: the round's, with its weights, not yet on `device`; None for
    a kind that needs none. cancelled: tells that the answer is no longer wanted.
    validation_share: of the samples that are kept back from training. pace: simulated seconds of a
    training per sample, on a virtual clock; 0 on a real one.
    """

    client: ClientId
    round: int
    data: ClientData
    classes: int
    groups: int
    device: torch.device
    model: nn.Module | None
    cancelled: Callable[[], bool] = lambda: False
    validation_share: float = 0.0
    pace: float = 0.0


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
