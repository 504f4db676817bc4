"""The seam for objectives: a client's local loss.

An objective is a pure object: its constructor takes its options (from the run file's
`[objective]` table) as keyword arguments and only stores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional


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
