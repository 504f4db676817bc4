"""The extension point for strategies: how updates are combined and how the model changes.

A strategy derives from `Strategy`, or from `strategies.averaging.Averaging`, which is FedAvg. It is
a pure object: its constructor takes its options (from the run file's `[strategy]` table) as keyword
arguments and only stores them; their annotations define the valid values. Per round the engine
calls `weigh` with the statistics of the updates, reduces them block by block as `weigh` returned,
and calls `apply` with the result. A strategy's only memory is the `State` it returns.
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
    """Method by which the updates of a round are combined into one."""

    MEAN = "mean"
    """Weighted sum; a mean if the weights sum to 1."""
    MEDIAN = "median"
    """Coordinate-wise median; weights are ignored."""
    TRIMMED_MEAN = "trimmed-mean"
    """Coordinate-wise mean without the `trim` share of smallest and of largest values."""
    CLIPPED_MEAN = "clipped-mean"
    """Weighted mean of the differences from the model, each scaled to an L2 norm ≤ `clip`."""


class Statistic(StrEnum):
    """Statistics that a strategy can have before it weighs updates, from one more pass."""

    NORMS = "norms"
    """The L2 norm of each update − model."""
    TENSOR_NORMS = "tensor-norms"
    """The same, of each tensor by itself."""


class Summation(StrEnum):
    """Sums that can be made of masked updates, none of which the coordinator sees."""

    BY_SAMPLES = "by-samples"
    """The mean difference, weighted by samples."""
    EQUAL = "equal"
    """The mean difference, all clients alike."""
    NORMALIZED = "normalized"
    """The mean, weighted by samples, of differences divided by each client's normalizer (a_k of
    FedNova), times the mean of the normalizers."""


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """Numbers of a round's updates, in client order.

    samples: the weight of each: int64 ≥ 1 as disclosed, or float64 > 0 if the selector sets
    weights (`Selection.weights`). steps: int64, optimiser steps taken. normalizers: float64 > 0,
    the effective number of a client's steps (a_k of FedNova): the distance that they would cover
    against a gradient of 1 at a learning rate of 1. losses: float64. buffers: names of the
    floating-point tensors that are not parameters (running statistics). norms: float64, L2 norm of
    update − model over all floating-point tensors. tensor_norms: the same for each floating-point
    tensor, by its name. Norms are None unless the strategy `needs` them. state: the strategy's
    state. tensors: names of the floating-point tensors that updates have.
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
    """How to reduce the updates; every array is float64 with one number per update, in client
    order.

    weights: of the updates. tensor_weights: of single tensors, instead; only for a mean.
    difference: True to reduce update − model instead of the update. Small steps then keep their
    precision beside large weights, and the weights need not sum to 1; only for a mean. auxiliary:
    weights of each auxiliary's weighted sum, by its name; 1/updates each if it is not named.
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
        """The client that sent it."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return one of the floating-point tensors, decoded: a copy in memory."""
        ...

    def weights(self) -> Weights:
        """Return all tensors of the client's model, decoded: a copy of the model in memory."""
        ...

    def auxiliary(self, name: str) -> Weights:
        """Return one of the auxiliaries that came with the update."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """Facts about the round that a strategy may use in `apply`.

    round: from 1. clients: number of the run's clients so far, selected or not (K). included: the
    clients whose updates were reduced, in client order. weights: theirs, from `weigh`. losses:
    those that they reported, NaN if none. buffers: names of the floating-point tensors that are
    not parameters. auxiliary: the reduced auxiliaries by name. updates: the included updates, to
    be read one after another; empty unless the strategy is `individual`.
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
    hosts. It corrects local steps and computes the auxiliaries that a client sends.

    keeps: True if clients keep a state from one training for the next. A client that has lost it
    fails and reports why. descends: True if the plug-in computes the gradients itself. The run's
    objective is then not used, and must be plain cross-entropy.
    """

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    keeps: bool = False
    descends: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerTraining:
    """Inputs of a strategy's own training on the coordinator.

    network: has the weights that `apply` returned, on the CPU; it is trained in place. weights:
    returns a copy of its tensors. load: overwrites them with such a copy, or with those of an
    update. updates: those of the round, in client order, each to be read separately. inputs: n × …,
    the task's public data. seed: of this round's training, in [0, 2^63); torch's global generator
    starts from it. round: from 1. progress: call it regularly with the share done, in [0, 1].
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
    """Names of the auxiliaries, which travel in both directions beside the weights. Each has the
    model's floating-point tensors, as float32."""
    correction: Correction | None = None
    """The clients' half, which uses the auxiliaries; None if there is none."""
    needs: frozenset[Statistic] = frozenset()
    """Statistics of the updates that `weigh` needs beyond what clients report."""
    individual: bool = False
    """True if it must see single updates, which secure aggregation hides: for reductions other than
    a mean, for norms, or for `RoundContext.updates`."""
    by_samples: bool = True
    """True if updates are weighted by `UpdateStatistics.samples`. If False, the strategy is not
    compatible with selectors that set weights."""
    summation: Summation = Summation.BY_SAMPLES
    """The sum that is made of masked updates."""
    one_way: tuple[str, ...] = ()
    """Name patterns of tensors that only `apply` changes: clients receive them, and neither train
    them nor send them back. Updates, and therefore `combined`, omit them. Not for masked rounds,
    nor with auxiliaries."""
    training: ClassVar[Mapping[str, object]] = {}
    """Settings of local training that it recommends, as in the run file's `[training]`."""
    needs_profiles: frozenset[str] = frozenset()
    """Profiles of clients that `enrol` looks at."""
    parts: bool = False
    """True if clients train different parts of the model, as `part` returns. `enrol` is then
    called, as it also is with `needs_profiles`."""
    most_clients: int | None = None
    """Maximum number of clients. A run with a larger roster or cohort is refused before it starts.
    If more clients join later, `enrol` should raise RunError."""
    opening: int = 0
    """Number of first rounds that only prepare the others: in them the run is not stopped early,
    and no model counts as its best."""
    trains: bool = False
    """True if `train` continues from the model that `apply` returns."""

    def review(
        self,
        training: LocalTraining,  # noqa: ARG002  part of the seam
        weighting: Weighting,  # noqa: ARG002  likewise
    ) -> Sequence[str]:
        """Return remarks on a run, a sentence each. Called before the run starts.

        training: the clients' settings. weighting: how exactly clients disclose their samples.
        Raises ConfigurationError, naming both parts and the reason, if they are not compatible.
        """
        return ()

    def enrol(self, state: State, population: Population, seed: int) -> State:  # noqa: ARG002  part of the seam
        """Return the state for a round, once the clients' profiles are known.

        Called before clients are instructed, with the state after the last committed round. It may
        be called again: the same arguments must give the same result. seed: the run's.
        """
        return state

    def part(self, state: State, client: str) -> int | None:  # noqa: ARG002  part of the seam
        """Return the part of the model that a client must train, from 0; None for all of it.

        The network defines the parts: its method `use_part` is called with the number before a
        training, and with None after it.
        """
        return None

    def check_model(self, layout: Layout) -> None:
        """Raise ConfigurationError, naming the tensor, if the strategy can't train such a model.

        Called before a run starts, if the model is created then: if only a part of it travels, if
        it has tensors that go `one_way`, or if the strategy has `parts` or `needs_profiles`.
        layout: of the tensors that travel.
        """

    def init(self, model: Weights) -> State:  # noqa: ARG002  part of the seam
        """Return the state before round 1."""
        return State()

    def broadcast(self, state: State) -> Mapping[str, Weights]:  # noqa: ARG002  part of the seam
        """Return the auxiliaries that all clients of the next cohort get, by name."""
        return {}

    def personal(self, state: State, client: str) -> Mapping[str, Weights]:  # noqa: ARG002  as above
        """Return the auxiliaries that only this client gets, by name; empty for none."""
        return {}

    @abstractmethod
    def weigh(self, statistics: UpdateStatistics) -> Combine:
        """Return how to reduce the updates of a round; there is at least one."""

    @abstractmethod
    def apply(
        self, state: State, model: Weights, combined: Weights, context: RoundContext
    ) -> tuple[Weights, State]:
        """Return the next model and state.

        model: each access to a tensor reads it from its file. combined: the result of the
        reduction, as weights, or as the difference from the model if `weigh` asked for that. It may
        be overwritten."""

    def train(self, training: ServerTraining) -> None:
        """Continue training the network in place; its weights afterwards are the round's model.

        Called in a separate process, which has torch and no data of the coordinator except these
        inputs. The process may be killed at any moment, and `train` is then called again: the same
        network, updates and seed must give the same weights. Raises TrainingError if it fails.
        """
        raise NotImplementedError
