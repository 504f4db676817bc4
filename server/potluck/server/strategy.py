"""The seam for strategies: how updates combine and how the model moves.

A strategy derives from `Strategy`, or from `strategies.averaging.Averaging`, which is FedAvg. It is
a pure object: its constructor takes its options (from the run file's `[strategy]` table) as keyword
arguments and only stores them; their annotations say what they may be. Per round the engine calls
`weigh` with what is known of the updates, reduces them block by block as it says, and calls
`apply` with the result. What a strategy remembers is the `State` it returns, nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from potluck.common.disclosure import Weighting
from potluck.common.settings.local_training import LocalTraining
from potluck.common.settings.plugins import STRATEGIES, Plugin
from potluck.common.tensors.layout import Layout
from potluck.server.selection import Population
from potluck.server.state import State

if TYPE_CHECKING:  # importing torch takes seconds, and most strategies need none
    from torch import Tensor, nn

Counts = NDArray[np.int64] | NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]
"""Named arrays. Floating-point ones take part in the arithmetic; integer ones are copied."""


class Reduction(StrEnum):
    """How the updates of a round become one."""

    MEAN = "mean"
    """Weighted sum; a mean where the weights sum to 1."""
    MEDIAN = "median"
    """Coordinate-wise median; weights are ignored."""
    TRIMMED_MEAN = "trimmed-mean"
    """Coordinate-wise mean without the `trim` share of smallest and of largest values."""
    CLIPPED_MEAN = "clipped-mean"
    """Weighted mean of the differences from the model, each scaled to an L2 norm ≤ `clip`."""


class Statistic(StrEnum):
    """What a strategy may have measured of the updates before it weighs them: one more pass."""

    NORMS = "norms"
    """The L2 norm of each update − model."""
    TENSOR_NORMS = "tensor-norms"
    """The same, of each tensor by itself."""


class Summation(StrEnum):
    """What masked updates are summed to, where no single one is seen."""

    BY_SAMPLES = "by-samples"
    """The mean difference, weighted by samples."""
    EQUAL = "equal"
    """The mean difference, all clients alike."""
    NORMALIZED = "normalized"
    """By samples, of differences divided by what each client's steps amount to (a_k of FedNova);
    times the mean of these."""


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """What is known of a round's updates, in client order.

    samples: what each counts with: int64 ≥ 1 as disclosed, or float64 > 0 where the selector says
    something else (`Selection.weights`). steps: int64, optimiser steps taken. normalizers: float64
    > 0, what a client's steps amount to (a_k of FedNova): how far they would have moved it against
    a gradient of 1 at a learning rate of 1. losses: float64. buffers: names of the floating-point
    tensors that are no parameters (running statistics). norms: float64, L2 norm of update − model
    over all floating-point tensors. tensor_norms: the same of each floating-point tensor by its
    name. Norms are None unless the strategy `needs` them. state: what the strategy remembers.
    tensors: names of the floating-point tensors that updates have.
    """

    clients: Sequence[str]
    samples: Counts
    steps: NDArray[np.int64]
    normalizers: NDArray[np.float64]
    losses: NDArray[np.float64]
    buffers: frozenset[str] = frozenset()
    norms: NDArray[np.float64] | None = None
    tensor_norms: Mapping[str, NDArray[np.float64]] | None = None
    state: State = field(default_factory=State)
    tensors: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How to reduce the updates; every array is float64 with one number for each, in client order.

    weights: of the updates. tensor_weights: of single tensors, instead; only for a mean.
    difference: reduce update − model instead of the update, so that nothing of a small step is
    lost beside large weights, and weights need not sum to 1; only for a mean. auxiliary: weights
    of each auxiliary's weighted sum, by its name; 1/updates each where it is not named.
    """

    weights: NDArray[np.float64]
    reduction: Reduction = Reduction.MEAN
    trim: float = 0.0
    clip: float | None = None
    tensor_weights: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    difference: bool = False
    auxiliary: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


class ReadableUpdate(Protocol):
    """One client's update, for strategies that look at each by itself."""

    @property
    def client(self) -> str:
        """Who sent it."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One of the floating-point tensors, decoded: a copy in memory."""
        ...

    def weights(self) -> Weights:
        """All tensors of the client's model, decoded: a copy of the model in memory."""
        ...

    def auxiliary(self, name: str) -> Weights:
        """One of the auxiliaries it came with."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What a strategy may look at when it moves the model.

    round: from 1. clients: the run's clients so far, selected or not (K). included: whose updates
    were reduced, in client order. weights: what `weigh` gave them. losses: what each of them
    reported, NaN where nothing. buffers: floating-point tensors that are no parameters. auxiliary:
    the reduced auxiliaries by name. updates: each of the included ones by itself, to be read one
    after another; empty unless the strategy is `individual`.
    """

    round: int
    clients: int
    included: Sequence[str]
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    losses: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    buffers: frozenset[str] = frozenset()
    auxiliary: Mapping[str, Weights] = field(default_factory=dict)
    updates: Sequence[ReadableUpdate] = ()


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The client's half of a strategy: a plug-in of the group `potluck.corrections`, installed on
    hosts, that corrects local steps and makes what a client sends beside its weights.

    keeps: whether clients keep something of one training for the next; then a client that has
    lost it fails, and says why. descends: whether it computes the gradients itself; then the run's
    objective is not asked, and must be plain cross-entropy.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    keeps: bool = False
    descends: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerTraining:
    """What a strategy has at hand for its own training on the coordinator.

    network: with the model that `apply` gave, on the CPU; it is trained in place. weights: copies
    its tensors. load: overwrites them by such a copy, or by those of an update. updates: those of
    the round, in client order, each to be read by itself. inputs: n × …, the task's public data.
    seed: of this round's training, in [0, 2^63); torch's global generator begins with it. round:
    from 1. progress: gets the share that is done, in [0, 1], now and then.
    """

    network: nn.Module
    weights: Callable[[], Weights]
    load: Callable[[Weights], None]
    updates: Sequence[ReadableUpdate]
    inputs: Tensor
    seed: int
    round: int
    progress: Callable[[float], None]


class Strategy(Plugin):
    """Combines updates and moves the model. Called from a worker thread."""

    group = STRATEGIES

    auxiliary: frozenset[str] = frozenset()
    """Names of what is sent down and up beside the weights; each has the tensors of the model
    that are floating-point, as float32."""
    correction: Correction | None = None
    """The clients' half, which uses the auxiliaries; None where there are none."""
    needs: frozenset[Statistic] = frozenset()
    """Statistics of the updates that `weigh` needs beyond what clients report."""
    individual: bool = False
    """True where it must see single updates, which secure aggregation hides: for other reductions
    than a mean, norms, or `RoundContext.updates`."""
    by_samples: bool = True
    """Whether updates count by `UpdateStatistics.samples`: otherwise it does not go with a selector
    that says what they count with."""
    summation: Summation = Summation.BY_SAMPLES
    """What masked updates are summed to, where no single one is seen."""
    one_way: tuple[str, ...] = ()
    """Patterns of names of tensors that only `apply` moves: they go down, and clients neither train
    them nor send them back. Updates, and so what `combined` holds, leave them out. Not for masked
    rounds, nor beside auxiliaries."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that it recommends, as in the run file's `[training]`."""
    needs_profiles: frozenset[str] = frozenset()
    """Profiles of clients that `enrol` looks at."""
    parts: bool = False
    """Whether clients train different parts of the model, as `part` says; then `enrol` is called,
    and so is it where there are `needs_profiles`."""
    most_clients: int | None = None
    """The most clients that it has a place for. A run with a larger roster or cohort is refused
    before it starts; with more that come, `enrol` should raise RunError."""
    opening: int = 0
    """How many rounds come first that train for what follows: in them the run is not stopped early,
    and no model counts as its best."""
    trains: bool = False
    """True where `train` goes on from the model that `apply` gives."""

    def review(
        self,
        training: LocalTraining,  # noqa: ARG002  part of the seam
        weighting: Weighting,  # noqa: ARG002  likewise
    ) -> Sequence[str]:
        """Called before a run starts. Returns remarks on it, a sentence each.

        training: the clients' settings. weighting: how exactly they disclose their samples. Raises
        ConfigurationError, naming both parts and the reason, where they don't go together.
        """
        return ()

    def enrol(self, state: State, population: Population, seed: int) -> State:  # noqa: ARG002  part of the seam
        """The state that a round goes by, once it is known whose profiles there are.

        Called before clients are instructed, with the state after the last committed round, and
        perhaps again: the same must come of the same. seed: the run's.
        """
        return state

    def part(self, state: State, client: str) -> int | None:  # noqa: ARG002  part of the seam
        """Which part of the model a client is to train, from 0; None for all of it.

        The network says what that means: its method `use_part` is called with the number before
        a training, and with None after it.
        """
        return None

    def check_model(self, layout: Layout) -> None:
        """Called before a run starts, where the model is made then: where a part of it travels, it
        has tensors that go `one_way`, or the strategy has `parts` or `needs_profiles`.

        layout: of the tensors that travel. Raises ConfigurationError, naming the tensor, where the
        strategy can't move such a model.
        """

    def init(self, model: Weights) -> State:  # noqa: ARG002  part of the seam
        """The state before round 1."""
        return State()

    def broadcast(self, state: State) -> Mapping[str, Weights]:  # noqa: ARG002  part of the seam
        """The auxiliaries that all clients of the next cohort get, by name."""
        return {}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:  # noqa: ARG002  as above
        """The auxiliaries that only this client gets, by name; empty for none."""
        return {}

    @abstractmethod
    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """How to reduce the updates of a round; at least one."""

    @abstractmethod
    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the next model and state.

        model: each access to a tensor reads it from its file. combined: the result of the
        reduction, as weights, or as the difference from the model if `weigh` said so; it may be
        written over."""

    def train(self, training: ServerTraining) -> None:
        """Train the network on from where it is; what it holds afterwards is the round's model.

        Called in a process of its own that has torch and, beside its memory, nothing of the
        coordinator's. It may be killed at any moment, and is called again: the same network,
        updates and seed must give the same weights. Raises TrainingError where it fails.
        """
        raise NotImplementedError
