"""The seam for strategies: how updates combine and how the model moves.

A strategy is a pure object: its constructor takes its options (from the run file's
`[strategy]` table) as keyword arguments and only stores them. Per round the engine calls
`weigh` with what is known of the updates, reduces them block by block as it says, and calls
`apply` with the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.server.state import State

Weights = Mapping[str, NDArray[Any]]
"""Named arrays. Floating-point ones take part in the arithmetic; integer ones are copied."""


class Reduction(StrEnum):
    """How the updates of a round become one."""

    MEAN = "mean"
    """Weighted mean."""
    MEDIAN = "median"
    """Coordinate-wise median; weights are ignored."""
    TRIMMED_MEAN = "trimmed-mean"
    """Coordinate-wise mean without the `trim` share of smallest and of largest values."""
    CLIPPED_MEAN = "clipped-mean"
    """Weighted mean of the differences from the model, each scaled to an L2 norm ≤ `clip`."""


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """What is known of a round's updates, in client order.

    samples: int64 ≥ 1, as disclosed. steps: int64, optimiser steps taken. losses: float64.
    norms: float64, L2 norm of update − model over all floating-point tensors; None unless the
    strategy asks for it (`needs_norms`).
    """

    clients: Sequence[str]
    samples: NDArray[np.int64]
    steps: NDArray[np.int64]
    losses: NDArray[np.float64]
    norms: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How to reduce the updates. weights: float64, one per update, in client order."""

    weights: NDArray[np.float64]
    reduction: Reduction = Reduction.MEAN
    trim: float = 0.0
    clip: float | None = None


class Strategy(Protocol):
    """Combines updates and moves the model. Called from a worker thread."""

    @property
    def auxiliary(self) -> frozenset[str]:
        """Named tensors sent down and up beside the weights."""
        ...

    @property
    def needs_norms(self) -> bool:
        """Whether `weigh` needs the norms of the updates (one more pass over them)."""
        ...

    def init(self, model: Weights) -> State:
        """The state before round 1."""
        ...

    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """How to reduce the updates of a round; at least one."""
        ...

    def apply(self, state: State, model: Weights, combined: Weights) -> tuple[Weights, State]:
        """The next model and state. `combined` is the reduced update as weights; may be reused."""
        ...
