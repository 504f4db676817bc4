"""The seam for objectives: a client's local loss.

An objective is a pure object: its constructor takes its options (from the run file's
`[objective]` table) as keyword arguments and only stores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from potluck.common.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one step, on the training device.

    inputs: b × …. labels: b, int64. indices: b, int64, their positions in the client's data.
    """

    inputs: Tensor
    labels: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True)
class LocalContext:
    """What an objective may look at besides the batch.

    round: from 1. label_counts: C, int64, the client's training samples per class. parameters: the
    model's trainable tensors, as they are now. received: the same tensors as they came from the
    coordinator; empty unless the objective's `needs_received` is true.
    """

    round: int
    label_counts: Tensor
    parameters: tuple[Tensor, ...]
    received: tuple[Tensor, ...] = ()


class Objective(Protocol):
    """A local loss. Called from a worker thread at each step; must not wait for the device."""

    @property
    def needs_received(self) -> bool:
        """Whether `loss` needs the weights as they came (a second copy on the device)."""
        ...

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:
        """The scalar to descend on, as a mean over the batch. logits: b × C."""
        ...


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Mean cross-entropy: what FedAvg's clients descend on."""

    @property
    def needs_received(self) -> bool:
        """It does not."""
        return False

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """−log softmax(logits)[label], averaged over the batch."""
        return functional.cross_entropy(logits, batch.labels)


class GeneralizedCrossEntropy:
    """(1 − p^q) / q, p the probability of the label: hard samples pull less than easy ones.

    q in (0, 1]: towards 0 it becomes cross-entropy, at 1 the mean absolute error. Zhang and
    Sabuncu, NeurIPS 2018; FedDiverse uses it to learn a bias on purpose. Raises ConfigurationError.
    """

    def __init__(self, *, q: float = 0.3) -> None:
        if not isinstance(q, (int, float)) or not 0 < q <= 1:
            raise ConfigurationError(
                f"objective generalized-cross-entropy: q must be in (0, 1], got {q!r}", q=q
            )
        self._q = float(q)

    @property
    def needs_received(self) -> bool:
        """It does not."""
        return False

    def loss(self, logits: Tensor, batch: Batch, local: LocalContext) -> Tensor:  # noqa: ARG002 - the seam hands it over
        """(1 − softmax(logits)[label]^q) / q, averaged over the batch."""
        return generalized_cross_entropy(logits, batch.labels, self._q)


def generalized_cross_entropy(logits: Tensor, labels: Tensor, q: float) -> Tensor:
    """The mean of (1 − p^q) / q over a batch. logits: b × C. labels: b, int64. q in (0, 1]."""
    logarithms = functional.log_softmax(logits, dim=1).gather(1, labels[:, None])
    return -torch.expm1(q * logarithms).mean() / q
