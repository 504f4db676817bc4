"""The extension point for corrections: the client's part of a strategy that sends extra tensors.

A correction is a plug-in of the group `potluck.corrections`, derived from `LocalCorrection`; the
strategy names it. Its constructor takes the options that the strategy sends and only stores them;
their annotations give the allowed types and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from potluck.client.objective import Batch
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import CORRECTIONS, Plugin
from potluck.common.task import Examples

Tensors = Mapping[str, Tensor]
"""Tensors by the name of the model's tensor."""
NamedAuxiliaries = Mapping[str, Tensors]
"""Tensors by the auxiliary's name."""


@dataclass(frozen=True, kw_only=True)
class CorrectionContext:
    """Inputs of a correction at the start of a training.

    Tensors are float32 and on the training device. parameters: the trainable tensors that are sent
    to the coordinator, as received; `begin` may change them in place, and training does. shared:
    auxiliaries that all clients of the cohort received, with the model's buffers. personal:
    auxiliaries that only this client received; may be empty. kept: the tensors that `finish`
    returned as `keep` in the last training whose update became part of a model; None if there was
    no such training. round: number of the round, from 1. seed: the training's random seed. samples:
    number of the client's training samples. positions: int64, indices of the training samples that
    this training uses; None for all. validation: the samples held back from training.
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
    """Result of a correction.

    send: tensors for the coordinator, by auxiliary; a missing tensor of the model counts as zero.
    keep: tensors of any names and shapes for the next training, kept only if this update becomes
    part of the model; None to keep nothing."""

    send: NamedAuxiliaries
    keep: NamedAuxiliaries | None = field(default=None)


class RunningCorrection(Protocol):
    """One training's correction. Called from the worker's thread; must not wait for the device."""

    def correct(self) -> None:
        """Change a step's gradients in place. They are already clipped if clipping is set."""
        ...

    def finish(self, normalizer: float) -> CorrectionOutcome:
        """Return the outcome after the last step. normalizer: a_k, the effective step count."""
        ...


@runtime_checkable
class RunningDescent(RunningCorrection, Protocol):
    """A running correction that computes the gradients itself, instead of the run's objective."""

    def descend(self, network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the gradients of a step's parameters. Returns its loss, a scalar, and the logits,
        b × C, both without a graph."""
        ...


class LocalCorrection(Plugin):
    """Base class of corrections. `begin` raises ConfigurationError for unsuitable settings."""

    group = CORRECTIONS

    of_gradients: ClassVar[bool] = False
    """True if the correction uses the client's data only through the gradients of the steps.

    It then also works with `[privacy]`, since these gradients have noise.
    """

    @abstractmethod
    def begin(self, context: CorrectionContext) -> RunningCorrection:
        """Return the correction of one training. Called before the first step."""
