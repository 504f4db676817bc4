"""The extension point for trainers: a task's own way to train a model and to measure it.

A task without its own trainer is a classification task, and the built-in loop trains its model. A
trainer has its own data loading, loss and optimiser. It is installed on both sides with its task:
hosts train and measure with it; the coordinator reads its declarations, and measures on its own
evaluation data.

Nothing here needs torch. A model is the object that the task's `model()` returned: a dict of named
numpy arrays, or a `torch.nn.Module`, which is on the host's device.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final

from potluck.common.errors import RoundClosedError
from potluck.common.names import ClientId
from potluck.common.settings.local_training import LocalTraining

SHARE: Final = "share"
"""Unit of a measure in [0, 1], which is shown in per cent."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The declaration of a measure.

    label: a few words, shown to users. unit: unit of the mean, e.g. "mm"; "" for a plain number,
    `SHARE` for a share. higher_is_better: True if a higher mean is better. lowest, highest: bounds
    of the mean that a client may report; the coordinator refuses values outside of them.
    """

    label: str
    unit: str = ""
    higher_is_better: bool = False
    lowest: float = -1e12
    highest: float = 1e12


@dataclass(frozen=True)
class Measured:
    """Sum and count of a measure over samples, or over other units, such as images.

    Sums and counts of several clients are added, so the mean over a federation is exact. count: ≥
    0.
    """

    sum: float
    count: int

    @property
    def mean(self) -> float:
        """The mean; NaN if `count` is 0."""
        return self.sum / self.count if self.count else math.nan


Measures = Mapping[str, Measured]
"""Measures by name; the names are those that the trainer declares."""


class Capability(StrEnum):
    """An ability that a trainer may have, and that selectors or `[privacy]` may need.

    LABEL_COUNTS: `Trainer.label_counts`, for profiles, secure sums and stepwise selection; the task
    declares the number of classes. LOSS: the measure `loss`, over a client's training samples, for
    selectors that request it before they select (pow-d). GRADIENT_NORM: `Trainer.gradient_norm`
    (feel). SKETCH: needs no further method; `train` may also be called to answer a question
    (hcsfed), with an empty folder that is deleted afterwards. PRIVACY: `train` takes only steps
    with noise if `TrainerSettings.privacy` is set, for runs with `[privacy]`; needs
    `Trainer.samples`. Other capabilities have the names in a selector's `reports`.
    """

    LABEL_COUNTS = "label_counts"
    LOSS = "loss"
    GRADIENT_NORM = "gradient-norm"
    SKETCH = "sketch"
    PRIVACY = "privacy"


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A client's contribution to a round, in addition to the trained model.

    samples: number of samples trained on, ≥ 1, by which updates are weighted; disclosed as far as
    the client's policy allows. steps: number of optimiser steps. measures: measures taken in the
    training, under declared names. reports: the numbers that the run's selector asked for, under
    names of the trainer's `capabilities`.
    """

    samples: int
    steps: int = 0
    measures: Measures = field(default_factory=dict)
    reports: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NoisySteps:
    """Steps of DP-SGD that a trainer has taken; fields as in `PrivateTraining`."""

    sampling_rate: float
    noise_multiplier: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class PrivateTraining:
    """The settings of a training with noise that hides single records, and the steps taken up to
    now.

    The client's ledger has been charged for these settings. sampling_rate: probability that a
    record is in a step's batch, in (0, 1]. noise_multiplier: standard deviation of the noise that
    is added to the sum of a batch's gradients, in units of `clip`, > 0. steps: maximum number of
    steps, ≥ 1. clip: maximum L2 norm of a record's gradient, > 0. expected_batch: divisor of the
    noisy sum, > 0. engine: implementation of `TrainerSettings.noisy_steps`. taken: recorded steps.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    clip: float
    expected_batch: float
    engine: Callable[..., contextlib.AbstractContextManager[tuple[Any, Any]]] | None = field(
        default=None, repr=False
    )
    taken: list[NoisySteps] = field(default_factory=list, repr=False)

    def record(
        self,
        *,
        steps: int = 1,
        sampling_rate: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        """Record steps, before their noise is drawn. `noisy_steps` calls this itself.

        sampling_rate, noise_multiplier: values of these steps; by default the values in the
        settings.
        """
        rate = self.sampling_rate if sampling_rate is None else sampling_rate
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        self.taken.append(NoisySteps(sampling_rate=rate, noise_multiplier=noise, steps=steps))

    @property
    def within_terms(self) -> bool:
        """True if steps were recorded, and none of them discloses more than the settings allow."""
        return 0 < sum(each.steps for each in self.taken) <= self.steps and all(
            each.steps > 0
            and 0 < each.sampling_rate <= self.sampling_rate
            and self.noise_multiplier <= each.noise_multiplier < math.inf
            for each in self.taken
        )

    def generator(self, device: str = "cpu") -> Any:
        """Return a new `torch.Generator` on a device, seeded from the operating system.

        Draw batches and noise from such generators: the coordinator knows the run's seeds.
        """
        import torch

        return torch.Generator(device).manual_seed(secrets.randbits(63))


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The part of the settings that gives a folder for the trainer's own files."""

    place: Path | None = field(default=None, repr=False)

    def folder(self) -> Path:
        """Return a folder for the trainer's own files, one for each client and run.

        The files stay for the client's next training or evaluation, even if a process was killed in
        between or a round was abandoned. If a run does not train for 90 days, its files are
        deleted. Raises RuntimeError outside a host.
        """
        if self.place is None:
            raise RuntimeError(
                "a trainer that runs outside a host has no folder; set `place` in the settings"
            )
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
    """The settings of one training of a trainer.

    training: the run's `[training]` table; a trainer uses the settings that apply to it. round:
    number of the round, from 1. seed: seed of everything random in the training; the global
    generators of `random`, numpy and torch were also seeded with it. client: client on whose data
    the model is trained. device: "cpu" or "cuda:N". reports: the numbers that the run's selector
    requests. privacy: settings of a differentially private training, for trainers with the
    capability `privacy`; None without noise. In a private training, `seed` and the seeds of the
    global generators come from the operating system.
    """

    training: LocalTraining
    round: int
    seed: int
    client: ClientId
    device: str = "cpu"
    reports: frozenset[str] = frozenset()
    privacy: PrivateTraining | None = None

    @contextlib.contextmanager
    def noisy_steps(self, model: Any, optimizer: Any, data: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the optimizer and the loader to train with: with noise if `privacy` is set.

        model: a `torch.nn.Module`, which is used as before. optimizer: a `torch.optim.Optimizer` of
        all its trainable parameters. data: a `DataLoader` or a `Dataset` with a length. Without
        `privacy`, yields `optimizer` and `data` unchanged.

        With `privacy`, the loader draws Poisson samples of the dataset until the granted steps are
        used up. A pass over it has about as many batches as one over `data`. Each step of the
        optimizer clips the gradient of each record, adds noise, and is recorded. Take one step for
        each batch. The loss must be the mean over the batch's records of losses that depend on one
        record each. Raises ConfigurationError for a model or an optimizer without such gradients.
        """
        if self.privacy is None:
            yield optimizer, data
            return
        if self.privacy.engine is None:
            raise RuntimeError(
                "a trainer that runs outside a host has no engine for noisy steps; set `engine` "
                "in the settings of `privacy`"
            )
        with self.privacy.engine(model, optimizer, data, self.privacy) as found:
            yield found

    @property
    def learning_rate(self) -> float:
        """The learning rate of this round."""
        return self.training.learning_rate_in(self.round)


class TrainingProgress:
    """Receives the progress of a training, and reports whether the training is still wanted."""

    def __init__(
        self,
        progress: Callable[[float], None] = lambda _: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """progress: function called with the completed share, in [0, 1]. cancelled: function that
        returns True to stop the training; it is called often. Both must return immediately."""
        self.note, self.is_cancelled = progress, cancelled

    def __call__(self, share: float) -> None:
        """Report the share of the training that is done, in [0, 1]. Call it at every step: it is
        cheap.

        Raises RoundClosedError if the training is no longer needed; don't catch it.
        """
        if self.is_cancelled():
            raise RoundClosedError("the training was cancelled, because no run waits for it")
        self.note(share)


class Trainer(ABC):
    """A task's own training. Called from one thread at a time; may take long.

    One object serves all clients and rounds of a host, as long as the task is loaded. Data that
    must outlive the task belong in `TrainerSettings.folder`.
    """

    measures: ClassVar[Mapping[str, Measure]]
    """All measures that the trainer may return, by name, the most important first; at least one.
    Names are lower-case words joined by underscores."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Capabilities that selectors may request; see `Capability`."""

    @abstractmethod
    def train(
        self, model: Any, data: Any, settings: TrainerSettings, report: TrainingProgress
    ) -> Contribution:
        """Train the model in place, from its current weights.

        data: the field `train` of the `ClientData` that the task returned for the client: a tensor,
        a `Dataset`, a path or any other object. If the model is a dict of arrays, values may be
        replaced, but names, shapes and types must stay.
        """

    @abstractmethod
    def evaluate(self, model: Any, data: Any, settings: EvaluationSettings) -> Measures:
        """Measure the model; its weights stay as they are.

        data: the field `held_out` of the `ClientData` or, on the coordinator, the result of
        `evaluation_data`. Derive all randomness from `settings.seed`: the global generators are not
        seeded.
        """

    def label_counts(self, data: Any) -> list[int]:
        """Count a client's training samples by class, for the capability `label_counts`.

        Each sample must count in at most one class: the noise on these counts hides one sample only
        if the sample changes one count by one. The host refuses counts whose sum exceeds `samples`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability label_counts; add a method "
            "`label_counts` to the class"
        )

    def samples(self, data: Any) -> int:
        """Return the number of a client's training samples.

        For the capabilities `label_counts` and `privacy`. A sample is a record as protected by
        `[privacy]`: one entry of the data set."""
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability label_counts or privacy; add a "
            "method `samples` that returns the number of training samples"
        )

    def gradient_norm(self, model: Any, data: Any) -> float:
        """Return the Euclidean norm of the gradient of the mean loss over a client's training data.

        The gradient is computed at the model's current weights, which must stay unchanged. For the
        capability `gradient-norm`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} declares the capability gradient-norm; add a method "
            "`gradient_norm` to the class"
        )
