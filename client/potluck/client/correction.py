"""The seam for corrections: the client's half of a strategy that sends tensors beside the model.

A correction is a plug-in of the group `potluck.corrections`, derived from `LocalCorrection`; the
strategy names it. Its constructor takes the options that the strategy sends and only stores them;
their annotations say what they may be.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from potluck.client.objective import Batch
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import CORRECTIONS, Plugin
from potluck.common.task import Examples

Tensors = Mapping[str, Tensor]
"""By the name of the model's tensor."""
NamedAuxiliaries = Mapping[str, Tensors]
"""By the auxiliary's name."""


@dataclass(frozen=True, kw_only=True)
class CorrectionContext:
    """What a correction begins a training with; tensors are float32 and on the training device.

    parameters: the trainable tensors that travel, as received; they will move. shared: what all
    clients of the cohort got; it has the model's buffers too. personal: what only this one got;
    empty for nothing. kept: what `finish` last returned to be kept and the coordinator then made
    part of a model; None where there is nothing yet. round: from 1. seed: of the training.
    samples: how many the client has to train on. positions: int64, the places of those that this
    training is on among them; None for all. validation: those that it keeps back.
    """

    parameters: Tensors
    shared: NamedAuxiliaries
    personal: NamedAuxiliaries
    kept: NamedAuxiliaries | None
    settings: LocalTraining
    round: int
    seed: int = 0
    samples: int = 0
    positions: Tensor | None = None
    validation: Examples | None = None


@dataclass(frozen=True, kw_only=True)
class CorrectionOutcome:
    """What comes of a correction. send: to the coordinator, by auxiliary; a tensor of the model
    that is left out counts as zero. keep: for the next training, if this update becomes part of
    the model, tensors of any names and shapes; None to keep nothing."""

    send: NamedAuxiliaries
    keep: NamedAuxiliaries | None = field(default=None)


class RunningCorrection(Protocol):
    """One training's correction. Called from the worker's thread; must not wait for the device."""

    def correct(self) -> None:
        """The gradients of a step are there, clipped if they are to be: change them in place."""
        ...

    def finish(self, normalizer: float) -> CorrectionOutcome:
        """The parameters have moved. normalizer: a_k, what the steps amount to."""
        ...


@runtime_checkable
class RunningDescent(RunningCorrection, Protocol):
    """One that computes the gradients itself, in place of the run's objective."""

    def descend(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the gradients of a step's parameters. Returns its loss, a scalar, and the logits,
        b × C, both without a graph."""
        ...


class LocalCorrection(Plugin):
    """The plug-in. Raises ConfigurationError where it can't go with the settings."""

    group = CORRECTIONS

    @abstractmethod
    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """Called before the first step."""
