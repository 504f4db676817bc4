"""The extension point for objectives: a client's local loss.

An objective derives from `Objective`. It is a pure object: its constructor takes its options (from
the run file's `[objective]` table) as keyword arguments and only stores them; their annotations
give the allowed types and values.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from potluck.common.settings.plugins import OBJECTIVES, Plugin


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one step, on the training device.

    inputs: b × …. labels: b, int64. indices: b, int64, positions of these samples in the client's
    data.
    """

    inputs: Tensor
    labels: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalContext:
    """Inputs of an objective in addition to the batch.

    round: number of the round, from 1. label_counts: C, int64, number of the client's training
    samples per class. parameters: the model's trainable tensors, with current values. received: the
    same tensors, with the values from the coordinator; empty unless the objective's
    `needs_received` is true. predictions: n × C, class probabilities that the received model gives
    for each of the client's samples, by position; None unless the objective's `needs_predictions`
    is true.
    """

    round: int
    label_counts: Tensor
    parameters: tuple[Tensor, ...]
    received: tuple[Tensor, ...] = ()
    predictions: Tensor | None = None


class Objective(Plugin):
    """A local loss. Called from a worker thread at each step; must not wait for the device."""

    group = OBJECTIVES

    supervised: bool = True
    """True if `loss` is a loss of the labels.

    If False, the loss is a term that is added to the loss of the other objectives, or to
    cross-entropy if the run names no supervised objective.
    """
    needs_received: bool = False
    """True if `loss` needs the received weights (a second copy on the device)."""
    needs_predictions: bool = False
    """True if `loss` needs the received model's predictions for every sample (a pass over all
    samples before the first step)."""
    per_sample: bool = False
    """True if `loss` is a mean over the batch of numbers that each depend on one sample alone, plus
    at most the proximal term. Only then can noise hide single records."""
    proximal: float = 0.0
    """μ ≥ 0 if the loss has the term μ/2·‖w − received‖². Strategies that normalise local work
    (FedNova) account for it."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """Return the scalar to minimise, as a mean over the batch. logits: b × C.

        If a run names several objectives, training minimises their sum."""
