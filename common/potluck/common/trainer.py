"""The extension point for trainers: a task's own way to train a model and to measure it.

A task that brings none is a classification task, and the built-in loop trains it. A trainer has
its own data loading, loss and optimiser. It is installed on both sides with its task: hosts train
and measure with it; the coordinator reads its declarations, and measures its own evaluation data.

Nothing here needs torch. A model is what the task's `model()` made: a dict of named numpy arrays,
or a `torch.nn.Module`, which then is on the device of the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final

from potluck.common.errors import RoundClosedError
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining

SHARE: Final = "share"
"""Unit of a measure in [0, 1], which people read in per cent."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The declaration of a measure.

    label: for people, a few words. unit: of its mean, e.g. "mm"; "" for a bare number, `SHARE` for
    a share. higher_is_better: its direction. lowest, highest: the means that a client may claim;
    the coordinator refuses others.
    """

    label: str
    unit: str = ""
    higher_is_better: bool = False
    lowest: float = -1e12
    highest: float = 1e12


@dataclass(frozen=True)
class Measured:
    """A measure over some samples, or over whatever it counts: its sum with its count.

    Those of several clients add up, so the mean over a federation is exact. count: ≥ 0.
    """

    sum: float
    count: int

    @property
    def mean(self) -> float:
        """Mean; NaN if nothing was counted."""
        return self.sum / self.count if self.count else math.nan


Measures = Mapping[str, Measured]
"""Measures by the names that the trainer declares."""


class Capability(StrEnum):
    """Something that a selector asks of clients, and that a trainer may be able to give.

    LABEL_COUNTS: `Trainer.label_counts`, for profiles, secure sums and steps by protocol; the task
    says how many classes there are. LOSS: its measure `loss`, over a client's training samples, for
    selectors that ask for it before they choose (pow-d). GRADIENT_NORM: `Trainer.gradient_norm`
    (feel). SKETCH: nothing more; `train` may also be called to answer a question (hcsfed), with a
    folder that is empty and not kept. Others have the names that a selector has in its `reports`.
    """

    LABEL_COUNTS = "label_counts"
    LOSS = "loss"
    GRADIENT_NORM = "gradient-norm"
    SKETCH = "sketch"


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A client's contribution to a round, in addition to the trained model.

    samples: number of samples trained on, ≥ 1, by which updates are weighted; disclosed as far as
    the client's policy allows. steps: number of optimiser steps. measures: of the training, under
    declared names. reports: the numbers that the run's selector asked for, under names of the
    trainer's `capabilities`.
    """

    samples: int
    steps: int = 0
    measures: Measures = field(default_factory=dict)
    reports: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A place for files of a trainer's own."""

    place: Path | None = field(default=None, repr=False)

    def folder(self) -> Path:
        """Return a folder for the trainer's own files, one for each client and run.

        The client's next training or evaluation finds the files again, even if a process was killed
        in between or a round was given up. A run that does not train for 90 days is forgotten.
        Raises RuntimeError outside a host.
        """
        if self.place is None:
            raise RuntimeError("there is no folder outside a host; give the settings a place")
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.place


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(_Place):
    """The circumstances of an evaluation.

    client: client whose held-out data are used; None on the coordinator. seed: seed of everything
    random in the evaluation. device: device of the model, "cpu" or "cuda:N".
    """

    seed: int
    client: ClientId | None = None
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(_Place):
    """The circumstances of a training.

    training: the run's `[training]` table; a trainer uses the settings that apply to it. round:
    from 1. seed: seed of everything random in the training; the global generators of `random`,
    numpy and torch were also seeded with it. client: client whose data are trained on. device:
    "cpu" or "cuda:N". reports: the numbers that the run's selector asks for.
    """

    training: LocalTraining
    round: int
    seed: int
    client: ClientId
    device: str = "cpu"
    reports: frozenset[str] = frozenset()

    @property
    def learning_rate(self) -> float:
        """The learning rate of this round."""
        return self.training.learning_rate_in(self.round)


class TrainingProgress:
    """Receives the progress of a training, and reports whether it is still wanted."""

    def __init__(
        self,
        progress: Callable[[float], None] = lambda _: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """progress: gets shares in [0, 1]. cancelled: is asked often. Both return at once."""
        self.note, self.is_cancelled = progress, cancelled

    def __call__(self, share: float) -> None:
        """Report the share of the training that is done, in [0, 1]. Call it at every step: it is
        cheap.

        Raises RoundClosedError if the training is no longer needed; don't catch it.
        """
        if self.is_cancelled():
            raise RoundClosedError("the training was cancelled; no run waits for it")
        self.note(share)


class Trainer(ABC):
    """A task's own training. Called from one thread at a time; may take its time.

    One object serves all clients and rounds of a host, as long as the task stays loaded. Data that
    must outlive the task goes into `TrainerSettings.folder`.
    """

    measures: ClassVar[Mapping[str, Measure]]
    """All measures it may return, by name, the most important first; at least one. Names are
    lower-case words joined by underscores."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that selectors may ask for; see `Capability`."""

    @abstractmethod
    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Train the model in place, from the weights it holds.

        data: `train` of what the task's `client_data` returned for the client: a tensor, a
        `Dataset`, a path, anything. Of a dict of arrays the values may be replaced, but not the
        names, shapes and types.
        """

    @abstractmethod
    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Measure the model; its weights stay as they are.

        data: `held_out` of what `client_data` returned or, on the coordinator, what
        `evaluation_data` returned. What is random follows from `settings.seed` alone: the global
        generators are not seeded.
        """

    def label_counts(self, data: Any) -> list[int]:
        """Count a client's training samples by class, for the capability `label_counts`.

        Each sample counts in one class at most: the noise on these counts hides one sample only if
        the sample changes one count by one. The host refuses counts whose sum exceeds `samples`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares label_counts; give it a method of that name"
        )

    def samples(self, data: Any) -> int:
        """Return the number of a client's training samples, for the capability `label_counts`."""
        raise NotImplementedError(
            f"{type(self).__name__} declares label_counts; give it a method samples as well, which "
            "returns the number of training samples"
        )

    def gradient_norm(self, model: Any, data: Any) -> float:
        """Return the Euclidean norm of the gradient of the mean loss over a client's training data.

        It is taken at the weights that the model holds and that stay as they are. For the
        capability `gradient-norm`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares gradient-norm; give it a method gradient_norm"
        )
